"""Lines of the program where values that nothing computes decided a size or a branch, for the report of the dry run."""

import json
import os

from . import courses, exceptions

# The most lines that are written. A program has few.
MAX_LINES = 256

# Sizes by (file, line, operator), and branches by (file, line, kind).
sizes, branches = {}, {}
template = os.environ.get("SIMCUDA_GUESSES")


def note_size(operator, chosen, total, is_assumed):
    """Notes that a line of the program selected `chosen` of at most `total` elements.

    `is_assumed` is true if a policy decided that, and false if random numbers did, which are others on a GPU.
    """
    place = exceptions.line_of_program()
    if not template or place is None:
        return
    found = entry(sizes, (*place, operator), {"location": "%s:%d" % place, "operator": operator, "times": 0, "selected": 0, "total": 0,
                                              "is_assumed": False})
    if found is None:
        return
    found["is_assumed"] |= is_assumed
    # Those of the largest one.
    if total > found["total"] or total == found["total"] and chosen > found["selected"]:
        found.update(selected=chosen, total=total)
    count(found)


def note_read():
    """Notes the line whose course a number decides that the program reads, if there is one. Nothing computed the number."""
    if not template:
        return
    decision = courses.decision_of_read()
    if decision is None:
        return
    place = "%s:%d" % decision.location
    found = entry(branches, (place, decision.kind), {"location": place, "kind": decision.kind, "optimizer": decision.optimizer, "times": 0})
    if found is not None:
        count(found)


def entry(lines, key, new):
    """The entry of a line, or None if there are too many."""
    return lines.get(key) or (lines.setdefault(key, new) if len(lines) < MAX_LINES else None)


def count(found):
    """Counts an entry, and writes all of them now and then: a process can end without notice."""
    found["times"] += 1
    # Few of many calls write.
    if found["times"] & (found["times"] - 1) == 0:
        write()


def write():
    """Writes all lines into the file of this process."""
    path = template.replace("%p", str(os.getpid()))
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump({"sizes": list(sizes.values()), "branches": list(branches.values())}, file)
    os.replace(path + ".new", path)
