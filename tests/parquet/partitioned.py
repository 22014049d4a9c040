"""partitioned.py FOLDER: runs the queries of docs/how-to/many-hosts.md on partitioned tables, and prints their results as JSON.

The queries are those of the page, between its marks `<!-- query NAME -->` and the end of the code block.
"""

import json
import pathlib
import re
import sys

import duckdb
import polars

folder = sys.argv[1]
page = (pathlib.Path(__file__).parents[2] / "docs/how-to/many-hosts.md").read_text()
queries = {name: re.sub(r"^    ", "", code, flags=re.MULTILINE) for name, code in
           re.findall(r"<!-- query (\w+) -->\n\n((?:    .*\n|\n)+)", page)}
db = duckdb.connect()


def rows(sql):
    return [list(row) for row in db.execute(sql.replace("TABLES", folder)).fetchall()]


def of_page(name):
    return rows(queries[name])


results = {"peaks_of_events": rows(
    "select rank, max(allocated) from read_parquet('TABLES/events/*/*/*.parquet', hive_partitioning = true) "
    "where rank is not null group by rank order by rank")}
results["peaks_of_ranks"] = rows("select rank, max(peak_allocated) from read_parquet('TABLES/ranks/*/*.parquet', hive_partitioning = true) "
                                 "where is_rank_process group by rank order by rank")
frame = polars.scan_parquet(f"{folder}/events/", hive_partitioning=True)
found = frame.filter(polars.col("rank").is_not_null()).group_by("rank").agg(polars.col("allocated").max()).sort("rank").collect()
results["peaks_by_polars"] = [list(row) for row in found.rows()]
phases = {}
for rank, phase, peak in of_page("phases"):
    phases.setdefault(str(rank), {})[phase] = peak
results["phases"] = phases
results["worst_against_median"] = of_page("worst_against_median")
results["growth"] = of_page("growth")
json.dump(results, sys.stdout)
