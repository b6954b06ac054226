# Runs in each Python process of a container, before its program, with Python 2.7 and 3.6 or newer. It lets the starter
# (`starter.py`) ask for the stacks of the process by three real-time signals, and then runs the container's own
# sitecustomize. It prints nothing, and an error in it changes nothing for the program.
# mypy: ignore-errors
import os
import sys


def _register():
    # `signal` and `threading` would cost milliseconds
    import _signal
    import _thread
    import faulthandler

    asked, dump_all, dump_main = (_signal.SIGRTMIN + number for number in (7, 8, 9))
    for number in (asked, dump_all, dump_main):
        if _signal.getsignal(number) != _signal.SIG_DFL:
            return  # the program's parent uses it

    def number_of(*names):
        return next((os.environ[name] for name in names if os.environ.get(name, "").isdigit()), "-")

    def open_file(forked):
        rank = number_of("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "RANK")
        local = number_of("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "LOCAL_RANK")
        header = "ktrain 1 %d %d %d %d %d %d %s %s\n" % (
            os.getpid(), os.getppid(), target, _thread.get_ident(), forked, asked, rank, local,
        )  # fmt: skip
        path = os.path.join(directory, "%d.%s.%s" % (os.getpid(), namespace, os.urandom(4).hex()))
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o644)
        os.write(fd, header.encode())
        os.dup2(fd, target, False)
        os.close(fd)

    def answer(number, frame):
        try:
            os.utime(target, (1, 1))  # Python runs here: nobody must use faulthandler, even if nothing can be written
            lines = []
            threads = list(sys._current_frames().items())[:100]
            main = _thread.get_ident()
            for ident, top in [(main, frame)] + [one for one in threads if one[0] != main]:
                lines.append("Thread 0x%x (most recent call first):" % ident)
                depth = 0
                while top is not None and depth < 60:
                    code, name = top.f_code, top.f_code.co_name
                    if name == "wrapper" and code.co_filename.endswith("c10d_logger.py"):  # of a collective operation
                        name = getattr(top.f_locals.get("func"), "__name__", name)
                    lines.append('  File "%s", line %d in %s' % (code.co_filename, top.f_lineno or 0, name))
                    top, depth = top.f_back, depth + 1
            os.write(target, ("\n".join(lines) + "\nktrain-end\n").encode("utf-8", "replace"))
        except Exception:
            pass

    def after_fork():
        try:
            open_file(1)
        except Exception:
            pass

    directory = os.path.join(os.path.dirname(os.path.abspath(__file__)), "files")
    namespace = "".join(filter(str.isdigit, os.readlink("/proc/self/ns/pid")))
    # a high number, so that the program gets the descriptors that it would get without us
    target = 957 if os.sysconf("SC_OPEN_MAX") > 957 else 247
    try:
        os.fstat(target)
        return  # inherited from the program's parent
    except OSError:
        pass
    open_file(0)
    _signal.signal(asked, answer)
    _signal.siginterrupt(asked, False)
    faulthandler.register(dump_all, file=target, all_threads=True, chain=False)
    faulthandler.register(dump_main, file=target, all_threads=False, chain=False)
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, (asked, dump_all, dump_main))
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=after_fork)


try:
    if sys.version_info >= (3, 6):
        _register()
except Exception:
    pass

# as if this file weren't there: the next sitecustomize of the path, and its errors
sys.path[:] = [entry for entry in sys.path if entry != os.path.dirname(__file__)]
sys.modules.pop("sitecustomize", None)
import sitecustomize  # noqa: E402, F401
