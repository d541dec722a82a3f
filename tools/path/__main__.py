from __future__ import annotations

from tools.path.program import main

if __name__ == "__main__":
    main()
