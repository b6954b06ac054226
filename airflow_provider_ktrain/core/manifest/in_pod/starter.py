# Starts a container's program and stays its parent. It is sent to the pods as text, runs with Python 3.6 and newer, and
# imports only the standard library. Arguments: archive and directory of the code, "" without code; the name of the
# directory for stacks, "" without stacks; the pod's grace period in seconds; 1 for a launcher of MPI; the command.
#
# Without stacks, it unpacks the code and replaces itself by the program. With stacks, it passes signals and the exit
# code on, and reaps processes. At the first SIGTERM, it asks the Python processes of the container for their stacks,
# prints them, and then passes the signal on. `sitecustomize.py` is the other side.
# mypy: ignore-errors
import os
import signal
import sys
import time

SITECUSTOMIZE = ""  # its text is put here
MARK = "KTRAIN_STACK "
SECONDS = 2.0  # between SIGTERM and its arrival at the program, at most; a fifth of a grace period below 10 s
MAX_RECORD, MAX_BYTES, MAX_RECORDS = 4000, 64 * 1024, 400  # bytes of one record and of all, and their number
SWEEP_SECONDS = 30.0  # between two removals of the files of processes that have ended
MAX_DEAD = 256  # files that are kept of ranks that have ended
FILES = "files"  # the directory below that of the sitecustomize, with one file of each process
FORWARDED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGWINCH", "SIGCONT")
ASKED, DUMP_ALL, DUMP_MAIN = (signal.SIGRTMIN + number for number in (7, 8, 9))
RANK, WORKER, LAUNCHER = "rank", "worker", "launcher"


def unpack(archive, directory):
    # The filter keeps Python 3.12 and 3.13 from warning about its default. Names are UTF-8 even if the locale is C
    # (Python 3.6). After a restart of the container, a file must not be written to where a link leads, be it the file
    # or a directory above it, and Python below 3.8.8 replaces no links. Files get the current time, because Python and
    # build tools recognize by it that what they have compiled is old.
    import tarfile

    tarfile.TarFile.extraction_filter = staticmethod(lambda member, path: member)
    with tarfile.open(archive) as packed:
        for member in packed:
            member.name, member.linkname = (
                os.fsdecode(name.encode("utf-8", "surrogateescape")) for name in (member.name, member.linkname)
            )
            member.mtime = time.time()
            path = directory
            for part in member.name.split("/"):
                path = os.path.join(path, part)
                if os.path.islink(path):
                    os.unlink(path)
        packed.extractall(directory)
    os.chdir(directory)


def prepend_path(directory):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [directory, os.environ.get("PYTHONPATH")]))


def execute(command):
    # Python ignores SIGPIPE and SIGXFSZ, which the program would inherit
    for name in ("SIGPIPE", "SIGXFSZ"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print("%s: %s" % (command[0], error.strerror), file=sys.stderr, flush=True)
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


# the files of processes


def make_directory(name):
    # Python imports from it, so only we may write there: others register in a directory below it.
    for parent in ("/dev/shm", "/tmp", "/var/tmp", "/run"):
        directory = os.path.join(parent, name)
        try:
            try:
                os.mkdir(directory)
            except FileExistsError:
                if os.path.islink(directory) or os.lstat(directory).st_uid != os.getuid():
                    continue
            os.chmod(directory, 0o755)
            files = os.path.join(directory, FILES)
            if not os.path.isdir(files):
                os.mkdir(files)
                os.chmod(files, 0o1777)
            if os.getpid() == 1:  # files of the container's run before
                for old in os.listdir(files):
                    if is_file_of_process(old):
                        os.unlink(os.path.join(files, old))
            path = os.path.join(directory, "sitecustomize.py")
            with open("%s.%d" % (path, os.getpid()), "w") as file:
                file.write(SITECUSTOMIZE)
            os.chmod(file.name, 0o644)
            os.rename(file.name, path)
            return directory
        except OSError:
            pass
    return ""


def is_file_of_process(name):
    # of this namespace: other containers may share the directory
    words = name.split(".")
    return len(words) == 3 and words[0].isdigit() and "pid:[%s]" % words[1] == os.readlink("/proc/self/ns/pid")


def status_of(pid):
    # the fields of /proc/PID/status; empty if the process doesn't exist
    try:
        with open("/proc/%d/status" % pid, "rb") as file:
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return {}
    fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    return {} if fields.get("State", "Z").startswith(("Z", "X")) else fields


def parents():
    # the parent of each process
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open("/proc/%s/stat" % name, "rb") as file:
                    found[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                pass
    return found


def ancestors(pid, parent_of):
    seen = []
    while parent_of.get(pid, 0) > 0 and parent_of[pid] not in seen and len(seen) < 200:
        pid = parent_of[pid]
        seen.append(pid)
    return seen


class Process:
    # a process that has registered: one file, `PID.NAMESPACE.RANDOM`

    def __init__(self, path):
        self.path = path
        self.pid = int(os.path.basename(path).split(".")[0])
        with open(path, "rb") as file:
            words = file.readline(200).decode(errors="replace").split()
        if words[:2] != ["ktrain", "1"] or len(words) != 10 or int(words[2]) != self.pid:
            raise ValueError
        self.parent, self.target, self.main, self.forked, self.signal = map(int, words[3:8])
        self.identity = self.rank, self.local = tuple("" if word == "-" else word for word in words[8:])
        self.status = status_of(self.pid)
        self.part = RANK
        self.offset, self.changed = 0, 0
        self.text, self.how = "", ""
        self.why = "no answer, state %s" % self.status.get("State", "?")[:1]

    @property
    def is_open(self):
        # whether the process has this file: it may have executed another program, or its number was given again
        try:
            target, file = os.stat("/proc/%d/fd/%d" % (self.pid, self.target)), os.stat(self.path)
        except OSError:
            return False
        return (target.st_dev, target.st_ino) == (file.st_dev, file.st_ino)

    def takes(self, number):
        # whether the process would answer the signal, and not die of it
        self.status = status_of(self.pid)
        return self.signal == ASKED and self.has(number, "SigCgt") and self.is_open

    def send(self, number):
        try:
            before = os.stat(self.path)
            self.offset, self.changed = before.st_size, before.st_mtime_ns
            os.kill(self.pid, number)
            if self.status.get("State", "").startswith("T"):  # stopped: it answers before it goes on
                os.kill(self.pid, signal.SIGCONT)
            return True
        except OSError:
            return False

    def read(self):
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            return file.read(1 << 20).decode(errors="replace")

    @property
    def runs_python(self):
        # whether the handler in Python has begun since the last signal
        now = os.stat(self.path)
        return (now.st_size, now.st_mtime_ns) != (self.offset, self.changed)

    def has(self, number, field):
        return bool(int(self.status.get(field, "0"), 16) >> (number - 1) & 1)

    def cpu(self):
        # seconds that the main thread and all others have run; None if there are too many
        used = [0.0, 0.0]
        try:
            names = os.listdir("/proc/%d/task" % self.pid)
            if len(names) > 64:
                return None
            for name in names:
                with open("/proc/%d/task/%s/schedstat" % (self.pid, name)) as file:
                    used[int(name) != self.pid] += int(file.read().split()[0]) / 1e9
        except (OSError, ValueError, IndexError):
            return None
        return used


def registered(directory, root, parent_of):
    # the processes of this container that have registered, the last file of each pid; other containers may share the
    # directory on a machine without PID namespaces
    found = {}
    for entry in os.scandir(os.path.join(directory, FILES)):
        if not is_file_of_process(entry.name):
            continue
        try:
            process = Process(entry.path)
            made = os.stat(entry.path).st_mtime
        except (OSError, ValueError):
            continue
        if process.status and not process.is_open:
            continue
        known = found.get(process.pid)
        if known is None or known[0] < made:
            found[process.pid] = made, process
    processes = {pid: process for pid, (_, process) in found.items()}
    for pid, process in processes.items():
        parent_of.setdefault(pid, process.parent)  # of those that have ended
    kept = [p for p in processes.values() if root in (0, 1) or root in ancestors(p.pid, parent_of)]
    by_pid = {process.pid: process for process in kept}
    for process in kept:
        above = [by_pid[pid] for pid in ancestors(process.pid, parent_of) if pid in by_pid]
        if process.forked or any(other.identity == process.identity for other in above):
            process.part = WORKER
        for other in above:
            if other.identity != process.identity:
                other.part = LAUNCHER
    return kept


def sweep(directory, root):
    # remove the files of processes that have ended, except those of ranks that a launcher has started
    kept = 0
    for process in registered(directory, root, parents()):
        if not process.status:
            kept += process.part is RANK and bool(process.local)
            if process.part is not RANK or not process.local or kept > MAX_DEAD:
                os.unlink(process.path)


def remove_directory(directory):
    for name in os.listdir(os.path.join(directory, FILES)):
        pid = name.split(".")[0]
        if pid.isdigit() and os.path.exists("/proc/%s" % pid):
            return  # another container of this machine uses it
    import shutil

    shutil.rmtree(directory, ignore_errors=True)


# asking


def ask(processes, began, seconds):
    # Let them write their stacks: first by Python, which can't harm them. faulthandler crashes a process whose frames
    # change meanwhile, so it is used only where the main thread has got the first signal, has had time to answer, and
    # has not: then it doesn't run Python.
    first = min(0.5, seconds / 2)
    asked = [process for process in processes if process.takes(ASKED) and process.send(ASKED)]
    waiting, cpu = asked, {}
    while waiting and time.monotonic() - began < first:
        time.sleep(0.01)
        waiting = [process for process in waiting if not process.read().endswith("ktrain-end\n")]
        if not cpu and time.monotonic() - began > first / 4:
            cpu = {process: (time.monotonic(), process.cpu()) for process in waiting}
    for process in asked:
        process.text, process.how, process.why = process.read(), "handler", ""
    silent = []
    for process in [process for process in asked if not process.text.endswith("ktrain-end\n")]:
        taken, (since, before) = process.takes(DUMP_MAIN), cpu.get(process, (0.0, None))
        state = process.status.get("State", "?")[:1]
        process.text, process.how, process.why = "", "", "no answer, state %s" % state
        now, elapsed = process.cpu(), time.monotonic() - since
        main = others = None
        if before is not None and now is not None:
            main, others = now[0] - before[0], now[1] - before[1]
        # a main thread that got no CPU may be in the middle of anything
        starved = process.has(ASKED, "ShdPnd") or (state == "R" and (main is None or main < elapsed / 4))
        blocked = process.has(DUMP_MAIN, "SigBlk") or state not in ("R", "S") or process.runs_python
        # One signal only: the kernel gives it to the main thread, whose stack DUMP_MAIN shows without its id, and might
        # give a second one to another thread.
        still = others is not None and others < elapsed / 100
        number = DUMP_ALL if still else DUMP_MAIN
        if first >= 0.3 and taken and not starved and not blocked and process.send(number):
            silent.append((process, number, ""))
    while silent and time.monotonic() - began < seconds * 3 / 4:
        time.sleep(0.02)
        left = []
        for process, number, before in silent:
            process.status, now = status_of(process.pid), process.read()
            pending = any(process.has(number, field) for field in ("ShdPnd", "SigBlk"))
            if pending or not now or now != before:
                left.append((process, number, now))
            else:
                process.text, process.how, process.why = now, "faulthandler", ""
        silent = left


def threads_of(process):
    # main thread or not, and the frames, innermost first, of each thread in a process's answer
    threads, main, frames = [], True, []
    for line in process.text.splitlines():
        words = line.split()
        if line.startswith(("Thread 0x", "Current thread 0x", "Stack (most")):
            ident = next((int(word, 16) for word in words if word.startswith("0x")), process.main)
            main, frames = ident == process.main, []
            threads.append((main, frames))
        elif line.startswith('  File "') and " in " in line:
            path, _, rest = line[8:].rpartition('", line ')
            number, _, name = rest.partition(" in ")
            frames.append([path[-160:], int(number) if number.isdigit() else 0, name[:80]])
    return sorted(threads, key=lambda thread: not thread[0])


def records(processes):
    # the records to print, the most important first
    order = {RANK: 0, LAUNCHER: 1, WORKER: 2}
    first, rest = [], []
    alive = sorted((p for p in processes if p.status), key=lambda p: (order[p.part], p.pid))
    # ranks that a launcher has started here and that have ended, unless torchrun has started them again
    dead = {p.identity: p for p in processes if p.local and p.part is RANK and not p.status}
    gone = [process for identity, process in sorted(dead.items()) if identity not in {p.identity for p in alive}]
    for process in gone:
        process.why = "gone"
    for process in gone + alive:
        about = {"pid": process.pid, "rank": process.rank, "local": process.local, "part": process.part}
        if process.why:
            first.append(dict(about, main=True, frames=[], why=process.why))
        for main, frames in threads_of(process):
            record = dict(about, main=main, frames=frames, how=process.how)
            while len(encoded(record)) > MAX_RECORD and record["frames"]:
                del record["frames"][-1]  # the outermost
            (first if main else rest).append(record)
    return first + rest


def encoded(record):
    import json

    return (MARK + json.dumps(record) + "\n").encode()


def put(line, end):
    # print one record by one write, which the pipe takes as a whole; False if nobody has read enough until then
    import select

    free = select.select([], [2], [], max(0.0, end - time.monotonic()))[1]
    return bool(free and os.write(2, line))


def out_of_time(number, frame):
    raise RuntimeError


def print_stacks(directory, root, began, seconds, most):
    # It waits for these seconds. On a machine without free CPU it takes longer: it ends after `most`, wherever it is.
    signal.signal(signal.SIGALRM, out_of_time)
    try:
        signal.setitimer(signal.ITIMER_REAL, max(most, 0.01))
        processes = registered(directory, root, parents())
        ask([process for process in processes if process.status], began, seconds)
        printed, left_out = 0, 0
        found = records(processes)
        for number, record in enumerate(found):
            line = encoded(record)
            full = printed + len(line) > MAX_BYTES or number >= MAX_RECORDS - 1
            if full or not put(line, began + seconds):
                left_out += 1
            else:
                printed += len(line)
        if found:
            end = {"end": True, "left_out": left_out, "seconds": round(time.monotonic() - began, 3)}
            put(encoded(end), began + seconds)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


# the parent


def ended():
    # the processes below us that have ended, with their wait status
    try:
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            yield pid, status
    except ChildProcessError:
        pass


def supervise(command, directory, grace, holds):
    root, before = os.getppid(), {}
    numbers = [getattr(signal, name) for name in FORWARDED]
    numbers += range(signal.SIGRTMIN, signal.SIGRTMAX + 1)
    waited = numbers + [signal.SIGCHLD]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    for number in waited:  # with a handler, the kernel sends them to process 1, too, and doesn't reap for us
        before[number] = signal.signal(number, lambda number, frame: None)
    has_terminal = os.isatty(0)
    try:
        child = os.fork()
    except OSError:  # the limit of processes: the program runs without us
        child, has_terminal = 0, True
    if child == 0:
        if not has_terminal:
            os.setpgid(0, 0)  # `kill 0` in a script must not reach us
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        execute(command)
    terminated, others, parent_of, code, swept = False, [], {}, None, time.monotonic()
    try:  # the program has started meanwhile
        import json  # noqa: F401
        import py_compile
        import select  # noqa: F401

        py_compile.compile(os.path.join(directory, "sitecustomize.py"), doraise=True)
    except Exception:
        pass
    while True:
        received = signal.sigtimedwait(waited, SWEEP_SECONDS)
        number = signal.SIGCHLD if received is None else received.si_signo
        if time.monotonic() - swept >= SWEEP_SECONDS:
            swept = time.monotonic()
            try:
                sweep(directory, root)
            except Exception:
                pass
        if number != signal.SIGCHLD:
            if number == signal.SIGTERM and not terminated:
                began = time.monotonic()
                seconds = min(SECONDS, grace / 5.0)
                try:
                    print_stacks(directory, root, began, seconds, grace / 5.0)
                except Exception:
                    pass
                if holds:  # mpirun would end the ranks of the Workers, which print meanwhile
                    time.sleep(max(0.0, began + seconds - time.monotonic()))
            if number == signal.SIGTERM:
                terminated, parent_of = True, parents()
                others = [pid for pid in parent_of if os.getpid() in ancestors(pid, parent_of) and pid != child]
            try:
                os.kill(child, number)
            except OSError:
                if number == signal.SIGTERM:
                    os.write(2, b"ktrain: SIGTERM can't be passed on to the program, which runs as another user.\n")
        for pid, status in ended():
            if pid == child:
                code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
                # A shell as process 1 would have ignored SIGTERM. Now it ends, and what it has started must get the
                # signal, and have its time until SIGKILL. Each gets it when its parent has ended: a program that saves
                # a checkpoint still needs its data loader.
                if not terminated or not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGTERM:
                    return code
        if code is not None:
            asked = set()
            while any(status_of(pid) for pid in others):
                for pid in others:
                    if pid not in asked and not status_of(parent_of[pid]):
                        asked.add(pid)
                        try:
                            os.kill(pid, signal.SIGTERM)
                        except OSError:
                            pass
                time.sleep(0.02)
                for _ in ended():
                    pass
            return code


def main():
    archive, directory, name, grace, holds = sys.argv[1:6]
    command = sys.argv[6:]
    if archive:
        unpack(archive, directory)
        prepend_path(directory)
    stacks = make_directory(name) if name and os.path.exists("/proc/self/status") else ""
    if not stacks:
        execute(command)
    prepend_path(stacks)
    code = supervise(command, stacks, float(grace), holds == "1")
    try:
        remove_directory(stacks)
    except Exception:
        pass
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
