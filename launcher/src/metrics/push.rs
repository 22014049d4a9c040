//! Pushes the figures to an OpenTelemetry collector: OTLP over HTTP, with the official crate.
//!
//! The library is built with the feature `otlp`. Its client (hyper, tokio) would make each default build longer.

use super::figures::Figures;

/// The interval between two pushes, unless the environment has `OTEL_METRIC_EXPORT_INTERVAL`.
#[cfg(feature = "otlp")]
const INTERVAL: std::time::Duration = std::time::Duration::from_secs(10);
/// How long one push may take. The end of a run waits for the last one.
#[cfg(feature = "otlp")]
const TIMEOUT: std::time::Duration = std::time::Duration::from_secs(5);

/// Says how to get a memtrace that pushes, unless this is one.
pub(crate) fn require() -> anyhow::Result<()> {
    if cfg!(feature = "otlp") {
        return Ok(());
    }
    let help = "install the wheel gpu-memtrace, or build memtrace with it: cargo install --locked --path launcher --features otlp";
    Err(crate::message::WithHelp::new("this memtrace was built without OpenTelemetry (--otlp)", help).into())
}

/// The pushes of a run.
#[cfg(not(feature = "otlp"))]
pub(crate) struct Push;

#[cfg(not(feature = "otlp"))]
impl Push {
    /// Never succeeds.
    pub(crate) fn start(_url: &str, _figures: Figures) -> anyhow::Result<Push> {
        require().map(|()| Push)
    }

    /// Pushes the last figures.
    pub(crate) fn finish(self) {}
}

#[cfg(feature = "otlp")]
pub(crate) use with_library::Push;

#[cfg(feature = "otlp")]
mod with_library {
    use std::sync::{Arc, Mutex, PoisonError};
    use std::time::Duration;

    use anyhow::Context;
    use opentelemetry::KeyValue;
    use opentelemetry::metrics::{AsyncInstrument, Meter, MeterProvider};
    use opentelemetry_otlp::{MetricExporter, Protocol, WithExportConfig};
    use opentelemetry_sdk::Resource;
    use opentelemetry_sdk::error::OTelSdkResult;
    use opentelemetry_sdk::metrics::data::ResourceMetrics;
    use opentelemetry_sdk::metrics::exporter::PushMetricExporter;
    use opentelemetry_sdk::metrics::{PeriodicReader, SdkMeterProvider, Temporality};

    use super::{Figures, INTERVAL, TIMEOUT};
    use crate::message;
    use crate::metrics::figures::{DeviceReading, Reading, for_each_device};
    use crate::metrics::metric::{BY_CATEGORY, DEVICE_MEMORY, PROCESSES, PYTORCH, PytorchMetric, WITHOUT_FIGURES};

    /// The pushes of a run.
    pub(crate) struct Push {
        provider: SdkMeterProvider,
        outcome: Arc<Mutex<Outcome>>,
        url: String,
    }

    /// What has become of the pushes.
    #[derive(Default)]
    struct Outcome {
        pushes: u64,
        failed: u64,
        last_error: String,
    }

    impl Push {
        /// Starts to push to this URL of a collector's metrics, from threads of the library.
        pub(crate) fn start(url: &str, figures: Figures) -> anyhow::Result<Push> {
            let exporter = MetricExporter::builder()
                .with_http()
                .with_protocol(Protocol::HttpBinary)
                .with_endpoint(url)
                .with_timeout(TIMEOUT)
                .build()
                .with_context(|| format!("cannot push metrics to {url}"))?;
            let outcome = Arc::<Mutex<Outcome>>::default();
            let mut reader = PeriodicReader::builder(CountedExporter { exporter, outcome: Arc::clone(&outcome) });
            if std::env::var_os("OTEL_METRIC_EXPORT_INTERVAL").is_none() {
                reader = reader.with_interval(INTERVAL);
            }
            // `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` of the environment are added.
            let named = std::env::var_os("OTEL_SERVICE_NAME").is_some();
            let mut resource = Resource::builder().with_attribute(KeyValue::new("host.name", crate::host::name()));
            if !named {
                resource = resource.with_service_name("memtrace");
            }
            let provider =
                SdkMeterProvider::builder().with_reader(reader.build()).with_resource(resource.build()).build();
            observe(&provider.meter("memtrace"), &figures);
            Ok(Push { provider, outcome, url: url.to_owned() })
        }

        /// Pushes the last figures. Reports pushes that failed.
        pub(crate) fn finish(self) {
            // A failure is in the outcome.
            _ = self.provider.shutdown_with_timeout(TIMEOUT);
            let Outcome { pushes, failed, last_error } = &*self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
            if *failed > 0 {
                message::warning(&format!("{failed} of {pushes} pushes to {} failed: {last_error}", self.url));
                message::help("check the address: a collector listens for OTLP over HTTP on port 4318");
            }
        }
    }

    /// The exporter of the library, which reports failures to nobody.
    struct CountedExporter {
        exporter: MetricExporter,
        outcome: Arc<Mutex<Outcome>>,
    }

    impl PushMetricExporter for CountedExporter {
        async fn export(&self, metrics: &ResourceMetrics) -> OTelSdkResult {
            let result = self.exporter.export(metrics).await;
            let mut outcome = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
            outcome.pushes += 1;
            if let Err(error) = &result {
                outcome.failed += 1;
                outcome.last_error = error.to_string();
            }
            result
        }

        fn force_flush(&self) -> OTelSdkResult {
            self.exporter.force_flush()
        }

        fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
            self.exporter.shutdown_with_timeout(timeout)
        }

        fn temporality(&self) -> Temporality {
            self.exporter.temporality()
        }
    }

    /// Registers the metrics. OpenTelemetry's collector gives them the names that Prometheus scrapes.
    fn observe(meter: &Meter, figures: &Figures) {
        for metric in &PYTORCH {
            let (name, figures) = (format!("memtrace.{}", metric.name), figures.clone());
            let unit = if metric.is_bytes { "By" } else { "1" };
            let read = move |instrument: &dyn AsyncInstrument<u64>| observe_pytorch(metric, &figures, instrument);
            if metric.is_counter {
                let counter = meter.u64_observable_counter(name).with_description(metric.help).with_unit(unit);
                counter.with_callback(read).build();
            } else {
                let gauge = meter.u64_observable_gauge(name).with_description(metric.help).with_unit(unit);
                gauge.with_callback(read).build();
            }
        }
        let parts: [(&str, &str, &'static str, Parts); 2] = [
            ("memtrace.device_memory", DEVICE_MEMORY, "owner", |figures| {
                figures.by_owner.iter().map(|(owner, bytes)| (owner.clone(), *bytes)).collect()
            }),
            ("memtrace.allocated_by_category", BY_CATEGORY, "category", |figures| {
                figures.by_category.iter().map(|(category, bytes)| (category.name().to_owned(), *bytes)).collect()
            }),
        ];
        for (name, help, key, parts) in parts {
            let figures = figures.clone();
            let gauge = meter.u64_observable_gauge(name).with_description(help).with_unit("By");
            gauge
                .with_callback(move |instrument| {
                    for_each_device(&figures.now(), |reading, device, figures| {
                        for (part, bytes) in parts(figures) {
                            let mut attributes = attributes(reading, device);
                            attributes.push(KeyValue::new(key, part));
                            instrument.observe(bytes, &attributes);
                        }
                    });
                })
                .build();
        }
        let counts: [(&str, &str, Count); 2] = [
            ("memtrace.processes", PROCESSES, |readings| readings.len()),
            ("memtrace.processes_without_figures", WITHOUT_FIGURES, |readings| {
                readings.iter().filter(|reading| reading.is_over).count()
            }),
        ];
        for (name, help, count) in counts {
            let figures = figures.clone();
            let gauge = meter.u64_observable_gauge(name).with_description(help);
            gauge.with_callback(move |instrument| instrument.observe(count(&figures.now()) as u64, &[])).build();
        }
    }

    /// The parts of a device's memory, by name.
    type Parts = fn(&DeviceReading) -> Vec<(String, u64)>;

    /// Counts processes.
    type Count = fn(&[Reading]) -> usize;

    fn observe_pytorch(metric: &PytorchMetric, figures: &Figures, instrument: &dyn AsyncInstrument<u64>) {
        for_each_device(&figures.now(), |reading, device, figures| {
            if let Some(pytorch) = &figures.pytorch {
                instrument.observe((metric.value)(pytorch), &attributes(reading, device));
            }
        });
    }

    fn attributes(reading: &Reading, device: i16) -> Vec<KeyValue> {
        let rank = reading.rank.map(|rank| KeyValue::new("rank", i64::from(rank)));
        let of_device = [KeyValue::new("pid", i64::from(reading.pid)), KeyValue::new("device", i64::from(device))];
        of_device.into_iter().chain(rank).collect()
    }
}
