//! `kvd metrics`: every metric of the daemon, with its type, its labels and its meaning.

use super::CliError;
use super::ask_daemon::json_text;
use super::table::wrap_text;
use crate::metrics::{Metric, MetricKind, MetricScope};
use clap::Args;
use serde::Serialize;

#[derive(Args)]
pub(super) struct MetricsArgs {
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Only metrics whose name has this text.
    #[arg(value_name = "TEXT", default_value = "")]
    part: String,
}

#[derive(Serialize)]
struct MetricRow {
    name: &'static str,
    kind: &'static str,
    /// Labels of whose it is; a metric's own labels are in its meaning.
    labels: &'static [&'static str],
    meaning: &'static str,
}

impl MetricRow {
    fn of_metric(metric: Metric) -> Self {
        let kind = match metric.kind() {
            MetricKind::Counter => "counter",
            MetricKind::Gauge => "gauge",
            MetricKind::Histogram => "histogram",
        };
        let labels: &[&str] = match metric.scope() {
            MetricScope::Daemon => &[],
            MetricScope::Device => &["device"],
            MetricScope::Model => &["namespace", "model", "codec"],
            MetricScope::Namespace => &["namespace"],
        };
        Self { name: metric.name(), kind, labels, meaning: metric.help() }
    }
}

/// The text that the command prints.
pub(super) fn metrics_text(args: &MetricsArgs) -> Result<String, CliError> {
    let named = Metric::ALL.iter().filter(|metric| metric.name().contains(&args.part));
    let rows: Vec<MetricRow> = named.map(|metric| MetricRow::of_metric(*metric)).collect();
    if rows.is_empty() {
        return Err(CliError::Usage(format!("no metric has {:?} in its name", args.part)));
    }
    if args.json {
        return json_text(&rows);
    }
    let mut text = String::new();
    for MetricRow { name, kind, labels, meaning } in rows {
        let by = if labels.is_empty() { "" } else { " by " };
        let line = format!("{name} ({kind}{by}{}): {meaning}", labels.join(", "));
        text.push_str(&wrap_text(&line, "    "));
    }
    Ok(text)
}
