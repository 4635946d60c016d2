"""A child that exits with a digit of its orders, or waits for its parent's end."""

from __future__ import annotations

import sys
import time

from omnistage.stages.launch import RankLaunch, end_with_parent, read_launch

if __name__ == "__main__":
    launch = read_launch(RankLaunch)
    end_with_parent()
    if launch.token:
        sys.exit(launch.replica_id * 10 + 3 if set(launch.token) == {"x"} else 1)
    time.sleep(60)
