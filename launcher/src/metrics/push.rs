//! Pushes the figures to an OpenTelemetry collector: OTLP over HTTP, with the official crate.
//!
//! The library is built with the feature `otlp`. Its client (hyper, tokio) would make each default build longer.

use super::figures::Figures;

/// The interval between two pushes, unless the environment has `OTEL_METRIC_EXPORT_INTERVAL`.
#[cfg(feature = "otlp")]
const INTERVAL: std::time::Duration = std::time::Duration::from_secs(10);
/// How long one push may take.
#[cfg(feature = "otlp")]
const TIMEOUT: std::time::Duration = std::time::Duration::from_secs(5);
/// How long the end of a run waits for a push in progress and for the last one together.
#[cfg(feature = "otlp")]
const END_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(4);

/// Says how to get a memtrace that pushes, unless this is one.
pub(crate) fn require() -> anyhow::Result<()> {
    if cfg!(feature = "otlp") {
        return Ok(());
    }
    let help = "install the wheel gpu-memtrace, or build memtrace with it: cargo install --locked --path launcher \
                --features otlp";
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
    use std::pin::Pin;
    use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
    use std::time::{Duration, Instant};

    use anyhow::Context;
    use crossbeam_channel::bounded;
    use opentelemetry::KeyValue;
    use opentelemetry::metrics::{AsyncInstrument, Meter, MeterProvider};
    use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
    use opentelemetry_otlp::{MetricExporter, Protocol, WithExportConfig, WithHttpConfig};
    use opentelemetry_sdk::Resource;
    use opentelemetry_sdk::error::OTelSdkResult;
    use opentelemetry_sdk::metrics::data::ResourceMetrics;
    use opentelemetry_sdk::metrics::exporter::PushMetricExporter;
    use opentelemetry_sdk::metrics::{PeriodicReader, SdkMeterProvider, Temporality};
    use reqwest::blocking::Client;
    use reqwest::redirect::Policy;

    use super::{END_TIMEOUT, Figures, INTERVAL, TIMEOUT};
    use crate::message;
    use crate::metrics::figures::{DeviceReading, Reading, for_each_device};
    use crate::metrics::metric::{
        BY_CATEGORY, DEVICE_MEMORY, EVENTS_WITHOUT_FIGURES, PROCESSES, PYTORCH, PytorchMetric, WITHOUT_FIGURES,
    };

    /// The pushes of a run.
    pub(crate) struct Push {
        provider: SdkMeterProvider,
        outcome: PushOutcome,
        url: String,
    }

    /// The outcome of the pushes so far.
    #[derive(Clone, Debug, Default)]
    struct PushOutcome(Arc<Mutex<Counts>>);

    #[derive(Debug, Default)]
    struct Counts {
        begun: u64,
        succeeded: u64,
        failed: u64,
        /// Why the last one of those failed.
        last_error: String,
        /// Why the push in progress fails, as far as the client knows.
        error: Option<String>,
        /// When the run stops waiting for pushes. `None` before its end.
        end: Option<Instant>,
    }

    impl PushOutcome {
        fn lock(&self) -> MutexGuard<'_, Counts> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner)
        }
    }

    impl Push {
        /// Starts to push to this URL of a collector's metrics, from threads of the library.
        pub(crate) fn start(url: &str, figures: Figures) -> anyhow::Result<Push> {
            let outcome = PushOutcome::default();
            // A proxy of the environment is used. A redirect could lead anywhere, so it is a failure.
            let client = Client::builder().redirect(Policy::none()).timeout(TIMEOUT).build();
            let cannot = || format!("cannot push metrics to {url}");
            let client = CollectorClient { client: client.with_context(cannot)?, outcome: outcome.clone() };
            let exporter = MetricExporter::builder()
                .with_http()
                .with_http_client(client)
                .with_protocol(Protocol::HttpBinary)
                .with_endpoint(url)
                .with_timeout(TIMEOUT)
                .build()
                .with_context(cannot)?;
            let mut reader = PeriodicReader::builder(CountedExporter { exporter, outcome: outcome.clone() });
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
            let Push { provider, outcome, url } = self;
            let begun_before = {
                let mut counts = outcome.lock();
                counts.end = Some(Instant::now() + END_TIMEOUT);
                counts.begun
            };
            // The thread also ends the threads of the library. A lookup of the collector's name can keep them, and
            // nothing waits for that.
            let (ended, end) = bounded::<()>(0);
            let shut_down = move || {
                // A failure is in the outcome.
                _ = provider.shutdown_with_timeout(END_TIMEOUT);
                drop((provider, ended));
            };
            if std::thread::Builder::new().name("memtrace-push-end".into()).spawn(shut_down).is_ok() {
                // The end of the thread closes the channel.
                _ = end.recv_timeout(END_TIMEOUT + Duration::from_millis(500));
            }
            let counts = outcome.lock();
            // A push in progress has failed now, and the last one too if it still waits for that one.
            let pushes = counts.begun.max(begun_before + 1);
            let failed = pushes - counts.succeeded;
            if failed > 0 {
                let error = if failed > counts.failed { NO_ANSWER } else { &counts.last_error };
                message::warning(&format!("{failed} of {pushes} pushes to {url} failed: {error}"));
                message::help("check the address: a collector listens for OTLP over HTTP on port 4318");
            }
        }
    }

    /// The error of a push that takes too long.
    const NO_ANSWER: &str = "the collector does not answer in time";

    /// The exporter of the library, which reports failures to nobody.
    struct CountedExporter {
        exporter: MetricExporter,
        outcome: PushOutcome,
    }

    impl PushMetricExporter for CountedExporter {
        async fn export(&self, metrics: &ResourceMetrics) -> OTelSdkResult {
            {
                let mut counts = self.outcome.lock();
                counts.begun += 1;
                counts.error = None;
            }
            let result = self.exporter.export(metrics).await;
            let mut counts = self.outcome.lock();
            match &result {
                Ok(()) => counts.succeeded += 1,
                Err(error) => {
                    counts.failed += 1;
                    counts.last_error = counts.error.take().unwrap_or_else(|| error.to_string());
                }
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

    /// Sends pushes. Whoever answers at the address is not trusted: an answer is its status, which must come in time.
    #[derive(Debug)]
    struct CollectorClient {
        client: Client,
        outcome: PushOutcome,
    }

    impl CollectorClient {
        fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
            let end = self.outcome.lock().end;
            let left = end.map_or(TIMEOUT, |end| end.saturating_duration_since(Instant::now()).min(TIMEOUT));
            let mut request: reqwest::blocking::Request = request.try_into()?;
            *request.timeout_mut() = Some(left);
            let answer = if left.is_zero() { None } else { Some(self.client.execute(request)) };
            let answer = match answer {
                Some(Ok(answer)) => answer,
                Some(Err(error)) if !error.is_timeout() => {
                    self.outcome.lock().error = Some(innermost(&error));
                    return Err(error.into());
                }
                _ => {
                    self.outcome.lock().error = Some(NO_ANSWER.to_owned());
                    return Err(NO_ANSWER.into());
                }
            };
            let status = answer.status();
            if !status.is_success() {
                let redirect = if status.is_redirection() { ", a redirect, which is not followed" } else { "" };
                self.outcome.lock().error = Some(format!("the collector answers {}{redirect}", status.as_u16()));
            }
            // The body says nothing that is used. It could be long, or never end.
            let mut response = Response::builder().status(status);
            if let Some(pause) = answer.headers().get("retry-after") {
                response = response.header("retry-after", pause);
            }
            Ok(response.body(Bytes::new())?)
        }
    }

    /// The cause that says why: that of the system.
    fn innermost(error: &dyn std::error::Error) -> String {
        error.source().map_or_else(|| error.to_string(), innermost)
    }

    impl HttpClient for CollectorClient {
        fn send_bytes<'client, 'future>(
            &'client self,
            request: Request<Bytes>,
        ) -> Pin<Box<dyn Future<Output = Result<Response<Bytes>, HttpError>> + Send + 'future>>
        where
            'client: 'future,
            Self: 'future,
        {
            // The thread of the library that pushes may wait.
            Box::pin(async move { self.send(request) })
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
        let counter =
            meter.u64_observable_counter("memtrace.events_without_figures").with_description(EVENTS_WITHOUT_FIGURES);
        let figures = figures.clone();
        counter.with_callback(move |instrument| instrument.observe(figures.unfollowed_events(), &[])).build();
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
        let workload = reading.labels.iter().map(|(name, value)| KeyValue::new(*name, value.clone()));
        of_device.into_iter().chain(rank).chain(workload).collect()
    }
}
