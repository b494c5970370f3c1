"""``python -m posttrain_gym``: the same command line as ``posttrain-gym``."""

from posttrain_gym.experiments.cli import main

if __name__ == "__main__":
    main()
