//! PromQL from metrics: the few shapes that the dashboard is made of.

use crate::metrics::{Kind, Metric};

/// A choice at the top of the dashboard: the values of one label.
pub(super) struct Variable {
    /// The label, and the variable's name.
    pub(super) name: &'static str,
    /// What the viewer reads.
    pub(super) title: &'static str,
    /// The metric whose label it is.
    pub(super) of: Metric,
}

/// Every choice but the data source.
pub(super) const VARIABLES: [Variable; 3] = [
    Variable { name: "instance", title: "Daemon", of: Metric::Ready },
    Variable { name: "namespace", title: "Namespace", of: Metric::Sequences },
    Variable { name: "model", title: "Model", of: Metric::Sequences },
];

/// One curve, or one per value of the labels it is split by.
pub(super) struct Query {
    pub(super) expr: String,
    pub(super) legend: String,
}

impl Query {
    /// A query of its own wording.
    pub(super) fn new(expr: String, legend: &str) -> Self {
        Self { expr, legend: legend.to_owned() }
    }

    /// A level, summed over what it is not split by.
    pub(super) fn level(metric: Metric, by: &[&str]) -> Self {
        Self { expr: total(metric, by), legend: legend(by) }
    }

    /// A ratio or an error, which no sum makes sense of: the largest.
    pub(super) fn largest(metric: Metric, by: &[&str]) -> Self {
        let expr = format!("max {}({})", clause(by), selector(metric));
        Self { expr, legend: legend(by) }
    }

    /// Growth of a counter per second.
    pub(super) fn rate(metric: Metric, by: &[&str]) -> Self {
        Self { expr: rate(metric, by), legend: legend(by) }
    }

    /// The same query under another name.
    pub(super) fn named(self, name: &str) -> Self {
        let legend = if self.legend.is_empty() {
            name.to_owned()
        } else {
            format!("{name} {}", self.legend)
        };
        Self { legend, ..self }
    }
}

/// Median and 99th percentile of a histogram.
pub(super) fn quantiles(metric: Metric, by: &[&str], name: &str) -> [Query; 2] {
    debug_assert_eq!(metric.kind(), Kind::Histogram);
    let mut labels = vec!["le"];
    labels.extend(by);
    let buckets = increase(&format!("{}_bucket", metric.name()), metric, &labels);
    [("p50", 0.5), ("p99", 0.99)].map(|(label, q)| {
        let expr = format!("histogram_quantile({q}, {buckets})");
        let name = if name.is_empty() { label.to_owned() } else { format!("{name} {label}") };
        Query { expr, legend: legend(by) }.named(&name)
    })
}

/// Growth of a counter per second, summed by `by`.
pub(super) fn rate(metric: Metric, by: &[&str]) -> String {
    debug_assert_eq!(metric.kind(), Kind::Counter);
    increase(metric.name(), metric, by)
}

/// Seconds per second that a histogram of durations took.
pub(super) fn busy(metric: Metric, by: &[&str]) -> String {
    debug_assert_eq!(metric.kind(), Kind::Histogram);
    increase(&format!("{}_sum", metric.name()), metric, by)
}

/// A level, summed by `by`.
pub(super) fn total(metric: Metric, by: &[&str]) -> String {
    debug_assert_eq!(metric.kind(), Kind::Gauge);
    format!("sum {}({})", clause(by), selector(metric))
}

/// The series of a metric that the viewer chose.
pub(super) fn selector(metric: Metric) -> String {
    format!("{}{}", metric.name(), choice(metric))
}

fn increase(series: &str, metric: Metric, by: &[&str]) -> String {
    format!("sum {}(rate({series}{}[$__rate_interval]))", clause(by), choice(metric))
}

/// The label matchers of the viewer's choice.
fn choice(metric: Metric) -> &'static str {
    if of_model(metric) {
        r#"{instance=~"$instance",namespace=~"$namespace",model=~"$model"}"#
    } else {
        r#"{instance=~"$instance"}"#
    }
}

/// Whether a metric carries a model's labels; a test compares this with the exporter.
pub(super) fn of_model(metric: Metric) -> bool {
    !matches!(
        metric,
        Metric::BuildInfo
            | Metric::Ready
            | Metric::ResidentBytes
            | Metric::RequestsTotal
            | Metric::RequestSeconds
            | Metric::Regions
            | Metric::RegionBytes
            | Metric::RegionCallsTotal
            | Metric::QueueDepth
            | Metric::QueueSeconds
            | Metric::GpuLaunchesTotal
            | Metric::GpuGraphChangesTotal
            | Metric::Models
            | Metric::PoolCapacityBytes
            | Metric::PoolUsedBytes
            | Metric::PoolLargestFreeBytes
            | Metric::PoolSlots
    )
}

fn clause(by: &[&str]) -> String {
    if by.is_empty() { String::new() } else { format!("by ({}) ", by.join(", ")) }
}

/// What Grafana writes beside a curve: the values of the labels it is split by.
pub(super) fn legend(by: &[&str]) -> String {
    let labels: Vec<_> =
        by.iter().filter(|name| **name != "le").map(|name| format!("{{{{{name}}}}}")).collect();
    labels.join(" ")
}
