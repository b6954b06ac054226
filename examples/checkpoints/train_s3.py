"""Train step by step and keep the last checkpoint in S3: KTRAIN_CHECKPOINT_DIR is `s3://bucket/path`.

It needs boto3, which takes credentials and the endpoint from its usual variables (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL).
"""

import argparse
import json
import os
import urllib.parse

import boto3


class Checkpoint:
    """One object in S3. S3 replaces it when the upload is complete: a kill during the upload keeps the previous one."""

    def __init__(self, directory):
        url = urllib.parse.urlsplit(directory)
        self.bucket, self.key = url.netloc, f"{url.path.strip('/')}/last.json"
        self.s3 = boto3.client("s3")

    def load(self):
        try:
            return json.load(self.s3.get_object(Bucket=self.bucket, Key=self.key)["Body"])
        except self.s3.exceptions.NoSuchKey:
            return {"step": 0, "weight": 0.0}

    def save(self, state):
        self.s3.put_object(Bucket=self.bucket, Key=self.key, Body=json.dumps(state).encode())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=4)
    parser.add_argument("--fail-at-step", type=int, help="exit 1 after this step, on the first attempt only")
    args = parser.parse_args()

    if os.environ.get("RANK", "0") != "0":  # one rank saves; the others would only load
        return
    checkpoint = Checkpoint(os.environ["KTRAIN_CHECKPOINT_DIR"])
    state = checkpoint.load()
    begin = state["step"]
    print(f"begins after step {begin}", flush=True)
    for step in range(begin + 1, args.steps + 1):
        state = {"step": step, "weight": state["weight"] + 0.5 * (3 - state["weight"])}
        print("KTRAIN_METRIC", json.dumps({"step": step, "loss": (3 - state["weight"]) ** 2}), flush=True)
        if step % args.save_every == 0:
            checkpoint.save(state)
        if step == args.fail_at_step and os.environ.get("KTRAIN_ATTEMPT", "1") == "1":
            raise SystemExit(f"fails after step {step}, as requested")
    print("KTRAIN_RESULT", json.dumps({"weight": state["weight"], "resumed_from": begin}), flush=True)


if __name__ == "__main__":
    main()
