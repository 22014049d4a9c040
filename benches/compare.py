"""What a recorder added, from samples of rounds, and as a ratio to what another added."""

import statistics

import frame


def added(samples, kind):
    """What a kind added in each round."""
    return [with_it - off for with_it, off in zip(samples[kind], samples["off"])]


def ratio_of(pairs):
    """The median of what memtrace added, of the median of what the peer added."""
    ours, theirs = zip(*pairs)
    theirs = statistics.median(theirs)
    return statistics.median(ours) / theirs if theirs > 0 else float("inf")


def check(losses, pairs):
    """What was to be recorded was, and next to nothing else: an allocation, the request to free it, and that it was freed."""
    frame.say(f"record: {pairs:,} pairs; {losses}")
    if losses["lost"] or not 3 * pairs <= losses["events"] <= 3.03 * pairs + 1000:
        raise SystemExit(f"{losses}: {3 * pairs} events were to be recorded")
