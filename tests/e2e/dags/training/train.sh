# the program of sends_code.py, with a file beside it
trap 'exit 143' TERM
echo "greeting: $(cat greeting.txt)"
sleep "${1:-0}" & wait
echo 'KTRAIN_RESULT {"trained": true}'
