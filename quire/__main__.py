"""`python -m quire` is the `quire` command."""

from __future__ import annotations

from quire.child import leave_current_directory

if __name__ == "__main__":
    leave_current_directory()
    from quire.cli.main import main

    raise SystemExit(main())
