"""read.py FOLDER: prints the tables in FOLDER as DuckDB and Polars read them, as JSON; fails where the two disagree."""

import json
import sys

import duckdb
import polars

folder = sys.argv[1]
tables = ["events", "blocks", "stacks", "phases"]
db = duckdb.connect()
for table in tables:
    db.execute(f"create view {table} as select * from read_parquet('{folder}/{table}-*.parquet')")


def rows(sql):
    return [list(row) for row in db.execute(sql).fetchall()]


results = {}
for table in tables:
    frame = polars.read_parquet(f"{folder}/{table}-*.parquet")
    columns = [[name, kind] for name, kind, *_ in rows(f"describe {table}")]
    assert [name for name, _ in columns] == frame.columns, table
    count = rows(f"select count(*) from {table}")[0][0]
    assert count == frame.height, (table, count, frame.height)
    sums = {}
    for name, kind in columns:
        if kind in ("BIGINT", "INTEGER") and count:
            ours, theirs = rows(f"select sum({name}) from {table}")[0][0], frame[name].cast(polars.Int128).sum()
            assert (ours or 0) == (theirs or 0), (table, name, ours, theirs)
            sums[name] = int(ours) if ours is not None else None
    results[table] = {"rows": count, "columns": columns, "sums": sums}

# The queries of docs/how-to/parquet.md.
results["peak"] = rows("select device, max(allocated) from events group by device order by device")
results["at_peak"] = rows(
    """
    with peak as (select run, pid, device, first(seq order by allocated desc, seq) as seq from events group by all)
    select blocks.device, sum(size)::bigint
    from blocks join peak using (run, pid, device)
    where alloc_seq <= peak.seq and (free_seq is null or free_seq > peak.seq)
    group by all order by all
    """
)
results["top"] = rows(
    """
    with peak as (select run, pid, device, first(seq order by allocated desc, seq) as seq from events group by all)
    select function, file, line, sum(size)::bigint as bytes
    from blocks join peak using (run, pid, device) join stacks using (run, pid, stack)
    where alloc_seq <= peak.seq and (free_seq is null or free_seq > peak.seq) and depth = 0
    group by all order by bytes desc, file, line, function limit 10
    """
)
results["by_phase"] = rows("select phase, sum(allocated)::bigint from phases group by phase order by phase")
results["events_by_phase"] = rows(
    "select phase, sum(size)::bigint from events where action = 'alloc' group by phase order by phase"
)
json.dump(results, sys.stdout)
