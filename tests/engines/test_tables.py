"""Partitioned tables in DuckDB, Spark and Ray Data, by the code of the page. Each has the figures of the report, and those of PyTorch."""

from __future__ import annotations

import os
import shutil
import zipfile
from pathlib import Path
from typing import Any, Dict, Iterator, List

import pytest
from conftest import Job, code_of_page, report

# Rank, peak, and reserved memory.
RankRow = tuple[int, int, int]


def execute(mark: str, job: Job, names: Dict[str, Any]) -> Any:
    """Runs the page's code, which assigns its result to `peaks`."""
    exec(code_of_page(mark).replace("TABLES", str(job.tables)), names)
    return names["peaks"]


def expected_ranks(job: Job) -> List[RankRow]:
    return sorted((rank["rank"], rank["peak_bytes"], rank["reserved_bytes"]) for rank in job.report["ranks"])


def test_the_report_has_the_peaks_of_pytorch(job: Job) -> None:
    assert expected_ranks(job) == [(own["rank"], own["peaks"]["any"], own["reserved"]) for own in job.measured]
    phases = job.reported_phases()
    for own in job.measured:
        for phase in ["forward", "backward", "optimizer"]:
            assert phases[own["rank"], phase] == own["peaks"][phase]
    from_tables = report(job.tables)
    assert from_tables["ranks"] and from_tables["ranks"] == job.report["ranks"]
    # The process without a rank.
    (alone,) = job.report["without_rank"]
    assert alone["peak_bytes"] >= 9 << 20 and from_tables["without_rank"] == [alone]


def by_duckdb(job: Job) -> Dict[tuple[int, str], int]:
    """The peak of each phase of each rank by DuckDB, which `test_duckdb` compares with the report."""
    import duckdb

    found = duckdb.sql(code_of_page("query phases").replace("TABLES", str(job.tables))).fetchall()
    peaks = {(rank, phase): peak for rank, phase, peak in found}
    assert len(peaks) == len(found)
    return peaks


def test_duckdb(job: Job) -> None:
    import duckdb

    peaks = by_duckdb(job)
    assert peaks == job.reported_phases()
    ranks = duckdb.sql(
        f"SELECT rank, peak_allocated, peak_reserved FROM read_parquet('{job.tables}/ranks/*/*.parquet', hive_partitioning = true) "
        "WHERE is_rank_process ORDER BY rank"
    ).fetchall()
    assert ranks == expected_ranks(job)


@pytest.fixture(scope="module")
def spark(folder: Path) -> Iterator[Any]:
    if shutil.which("java") is None:
        pytest.skip("Spark needs Java (Debian: apt-get install default-jre-headless)")
    import pyspark

    # Where musl is installed beside glibc, Snappy takes its library for musl, which a Java for glibc cannot load.
    (jar,) = (Path(pyspark.__file__).parent / "jars").glob("snappy-java-*.jar")
    library = zipfile.ZipFile(jar).extract(f"org/xerial/snappy/native/Linux/{os.uname().machine}/libsnappyjava.so", folder / "snappy")
    java = f"-Dorg.xerial.snappy.lib.path={Path(library).parent} -Dorg.xerial.snappy.lib.name=libsnappyjava.so"
    builder = pyspark.sql.SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").config("spark.driver.extraJavaOptions", java)
    session = builder.config("spark.local.dir", str(folder)).config("spark.driver.host", "127.0.0.1").getOrCreate()
    yield session
    session.stop()


def test_spark(job: Job, spark: Any) -> None:
    found = execute("engine spark", job, {"spark": spark}).collect()
    assert {(row[0], row[1]): row[2] for row in found if row[0] is not None} == by_duckdb(job)
    # The process without a rank.
    assert [tuple(row) for row in found if row[0] is None] == [(None, "load", 9 << 20)]
    ranks = spark.read.parquet(f"{job.tables}/ranks").where("is_rank_process").select("rank", "peak_allocated", "peak_reserved")
    assert sorted(tuple(row) for row in ranks.collect()) == expected_ranks(job)


@pytest.fixture(scope="module")
def ray(folder: Path) -> Iterator[Any]:
    import ray

    ray.init(address="local", include_dashboard=False, num_cpus=2, num_gpus=0, log_to_driver=False)
    yield ray
    ray.shutdown()


def test_ray_data(job: Job, ray: Any) -> None:
    import ray.data

    found = execute("engine ray", job, {"ray": ray}).take_all()
    assert {(row["rank"], row["phase"]): row["max(peak)"] for row in found} == by_duckdb(job) and len(found) == len(by_duckdb(job))
    ranks = ray.data.read_parquet(f"{job.tables}/ranks").filter(lambda row: row["is_rank_process"]).take_all()
    assert sorted((row["rank"], row["peak_allocated"], row["peak_reserved"]) for row in ranks) == expected_ranks(job)
