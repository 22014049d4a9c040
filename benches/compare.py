"""The time that a recorder adds, from samples of rounds, and its ratio to the time that another recorder adds."""

import statistics

import frame


def added(samples, kind):
    """The time that a kind of recorder added in each round."""
    return [with_it - off for with_it, off in zip(samples[kind], samples["off"])]


def ratio_of(pairs):
    """The median time that memtrace added, divided by the median that the peer added; infinite where the peer added
    none."""
    ours, theirs = zip(*pairs)
    theirs = statistics.median(theirs)
    return statistics.median(ours) / theirs if theirs > 0 else float("inf")


def check(losses, pairs):
    """Requires that every event was recorded and hardly any other: a pair is an allocation, a request to free, a
    completed free."""
    frame.say(f"record: {pairs:,} pairs; {losses}")
    if losses["lost"] or not 3 * pairs <= losses["events"] <= 3.03 * pairs + 1000:
        raise SystemExit(f"{losses}: {3 * pairs} events were to be recorded")
