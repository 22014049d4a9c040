"""Scrapes a URL and prints the samples as JSON, in the format of Prometheus and in that of OpenMetrics."""

import json
import sys
import urllib.request

from prometheus_client import parser
from prometheus_client.openmetrics import parser as openmetrics


def scrape(accept):
    request = urllib.request.Request(sys.argv[1], headers={"Accept": accept})
    with urllib.request.urlopen(request) as response:
        return response.headers["Content-Type"], response.read().decode()


def samples(families):
    return [[s.name, s.labels, s.value, f.type] for f in families for s in f.samples]


kind, text = scrape("text/plain")
assert kind.startswith("text/plain; version=0.0.4"), kind
plain = samples(parser.text_string_to_metric_families(text))
kind, text = scrape("application/openmetrics-text; version=1.0.0")
assert kind.startswith("application/openmetrics-text; version=1.0.0"), kind
print(json.dumps([plain, samples(openmetrics.text_string_to_metric_families(text))]))
