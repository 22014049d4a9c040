"""Runs every case, with the GIL released and kept. Prints what failed, then `N passed, N failed`."""

import sys
import traceback

import cases
from probe import Checker, Probe

passed = failed = 0
only = sys.argv[1:]
for released in (True, False):
    probe = Probe(released)
    check = Checker(probe)
    # The first capture verifies the layout.
    if not probe.capture():
        print("no stack: %s" % (probe.reason() or "no reason given"))
        print("0 passed, 1 failed")
        sys.exit(1)
    for name in sorted(name for name in dir(cases) if name.startswith("case_")):
        if only and name[5:] not in only:
            continue
        try:
            getattr(cases, name)(check)
            passed += 1
        except BaseException as error:
            failed += 1
            print("%s, GIL %s: %s: %s" % (name[5:], "released" if released else "kept", type(error).__name__, error))
            if not isinstance(error, (cases.Mismatch, AssertionError)):
                traceback.print_exc(limit=-3)
print("%s: %d passed, %d failed" % (sys.version.split()[0], passed, failed))
sys.exit(failed != 0)
