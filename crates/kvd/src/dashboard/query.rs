//! PromQL from metrics: the few shapes that the dashboard is made of.

use crate::metrics::{Metric, MetricKind, MetricScope};

/// A choice at the top of the dashboard: the values of one label.
pub(super) struct DashboardVariable {
    /// The label, and the variable's name.
    pub(super) name: &'static str,
    /// The text that the viewer reads.
    pub(super) title: &'static str,
    /// The metric whose label it is.
    pub(super) of: Metric,
}

/// Every choice but the data source.
pub(super) const VARIABLES: [DashboardVariable; 4] = [
    DashboardVariable { name: "job", title: "Job", of: Metric::Ready },
    DashboardVariable { name: "instance", title: "Daemon", of: Metric::Ready },
    DashboardVariable { name: "namespace", title: "Namespace", of: Metric::Sequences },
    DashboardVariable { name: "model", title: "Model", of: Metric::Sequences },
];

/// One curve, or one per value of the labels it is split by.
pub(super) struct PanelQuery {
    pub(super) expr: String,
    pub(super) legend: String,
}

impl PanelQuery {
    /// A query of its own wording.
    pub(super) fn new(expr: String, legend: &str) -> Self {
        Self { expr, legend: legend.to_owned() }
    }

    /// A level, summed over what it is not split by.
    pub(super) fn level(metric: Metric, by: &[&str]) -> Self {
        Self { expr: sum_level(metric, by), legend: legend(by) }
    }

    /// A ratio or an error, which no sum makes sense of: the largest.
    pub(super) fn largest(metric: Metric, by: &[&str]) -> Self {
        let expr = format!("max {}({})", by_clause(by), selector(metric));
        Self { expr, legend: legend(by) }
    }

    /// Growth of a counter per second.
    pub(super) fn rate(metric: Metric, by: &[&str]) -> Self {
        Self { expr: rate(metric, by), legend: legend(by) }
    }

    /// Growth per second of the series of a counter that `matcher` names.
    pub(super) fn rate_where(metric: Metric, matcher: &str, by: &[&str]) -> Self {
        Self { expr: rate_where(metric, matcher, by), legend: legend(by) }
    }

    /// This query, under another name.
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
pub(super) fn quantile_queries(metric: Metric, by: &[&str], name: &str) -> [PanelQuery; 2] {
    debug_assert_eq!(metric.kind(), MetricKind::Histogram);
    let mut labels = vec!["le"];
    labels.extend(by);
    let buckets = sum_increase(&format!("{}_bucket", metric.name()), metric, &labels);
    [("p50", 0.5), ("p99", 0.99)].map(|(label, q)| {
        let expr = format!("histogram_quantile({q}, {buckets})");
        let name = if name.is_empty() { label.to_owned() } else { format!("{name} {label}") };
        PanelQuery { expr, legend: legend(by) }.named(&name)
    })
}

/// Growth of a counter per second, summed by `by`.
pub(super) fn rate(metric: Metric, by: &[&str]) -> String {
    rate_where(metric, "", by)
}

/// Growth per second of the series that `matcher` names, such as `work="store"`, summed by `by`.
pub(super) fn rate_where(metric: Metric, matcher: &str, by: &[&str]) -> String {
    debug_assert_eq!(metric.kind(), MetricKind::Counter);
    let choice = label_matchers(metric, matcher);
    format!("sum {}(rate({}{choice}[$__rate_interval]))", by_clause(by), metric.name())
}

/// Seconds per second that a histogram of durations took.
pub(super) fn busy_seconds(metric: Metric, by: &[&str]) -> String {
    debug_assert_eq!(metric.kind(), MetricKind::Histogram);
    sum_increase(&format!("{}_sum", metric.name()), metric, by)
}

/// A level, summed by `by`.
pub(super) fn sum_level(metric: Metric, by: &[&str]) -> String {
    debug_assert_eq!(metric.kind(), MetricKind::Gauge);
    format!("sum {}({})", by_clause(by), selector(metric))
}

/// The series of a metric that the viewer chose.
pub(super) fn selector(metric: Metric) -> String {
    format!("{}{}", metric.name(), label_matchers(metric, ""))
}

fn sum_increase(series: &str, metric: Metric, by: &[&str]) -> String {
    format!("sum {}(rate({series}{}[$__rate_interval]))", by_clause(by), label_matchers(metric, ""))
}

/// The label matchers of the viewer's choice of daemons.
pub(super) const OF_DAEMON: &str = r#"job=~"$job",instance=~"$instance""#;

/// The label matchers of the viewer's choice, and one more if it is not empty.
fn label_matchers(metric: Metric, matcher: &str) -> String {
    let model = match metric.scope() {
        MetricScope::Model => r#",namespace=~"$namespace",model=~"$model""#,
        MetricScope::Namespace => r#",namespace=~"$namespace""#,
        MetricScope::Device | MetricScope::Daemon => "",
    };
    let comma = if matcher.is_empty() { "" } else { "," };
    format!("{{{OF_DAEMON}{model}{comma}{matcher}}}")
}

fn by_clause(by: &[&str]) -> String {
    if by.is_empty() { String::new() } else { format!("by ({}) ", by.join(", ")) }
}

/// The text beside a curve: the values of the labels it is split by.
pub(super) fn legend(by: &[&str]) -> String {
    let labels: Vec<_> =
        by.iter().filter(|name| **name != "le").map(|name| format!("{{{{{name}}}}}")).collect();
    labels.join(" ")
}
