"""`python -m omnistage` is the command `omnistage`."""

from __future__ import annotations

from omnistage.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
