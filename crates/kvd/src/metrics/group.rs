//! Series that end together: those of a registered model, or of a device.
//!
//! The exporter library forgets no series, so counters and levels of what has an end of its own are
//! kept here, and written in the library's own format.

use super::Metric;
use metrics::{Counter, Gauge};
use metrics_exporter_prometheus::formatting::{
    sanitize_label_value, write_help_line, write_type_line,
};
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// How the 64 bits of a series are read.
#[derive(Clone, Copy)]
enum SeriesReading {
    /// A whole number.
    Count,
    /// Nanoseconds, shown in seconds.
    Nanoseconds,
    /// A floating-point number; NaN stands for no series.
    Level,
}

/// One line of the exposition.
struct MetricSeries {
    metric: Metric,
    /// `name{labels}` as written.
    text: String,
    bits: Arc<AtomicU64>,
    reading: SeriesReading,
}

/// A counter of seconds: the crate `metrics` counts in whole numbers alone.
#[derive(Clone)]
pub struct SecondsCounter(Arc<AtomicU64>);

impl SecondsCounter {
    /// Adds a duration.
    pub fn add_time(&self, took: Duration) {
        let nanoseconds = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.0.fetch_add(nanoseconds, Ordering::Relaxed);
    }
}

/// Series with some labels in common. What holds it keeps them on the page.
pub(super) struct SeriesGroup {
    /// By metric, in the order of [`Metric::ALL`].
    series: Vec<MetricSeries>,
}

impl SeriesGroup {
    /// A counter of the group as it stands; of several series of it the sum.
    pub(super) fn read_count(&self, metric: Metric) -> u64 {
        self.series.iter().map(|series| series.read_bits(metric)).sum()
    }
}

/// Makes a [`SeriesGroup`]: handles first, then the group.
pub(super) struct GroupBuilder<'a> {
    labels: &'a [(&'static str, &'a str)],
    series: Vec<MetricSeries>,
}

impl<'a> GroupBuilder<'a> {
    /// A group whose series all carry `labels`.
    pub(super) fn new(labels: &'a [(&'static str, &'a str)]) -> Self {
        Self { labels, series: Vec::new() }
    }

    /// A counter that begins at 0.
    pub(super) fn counter(&mut self, metric: Metric, own: &[(&'static str, &str)]) -> Counter {
        Counter::from_arc(self.add_series(metric, own, SeriesReading::Count, 0))
    }

    /// A counter of seconds that begins at 0.
    pub(super) fn seconds(
        &mut self,
        metric: Metric,
        own: &[(&'static str, &str)],
    ) -> SecondsCounter {
        SecondsCounter(self.add_series(metric, own, SeriesReading::Nanoseconds, 0))
    }

    /// A level, which has no series until it is set, nor while it is set to NaN.
    pub(super) fn gauge(&mut self, metric: Metric, own: &[(&'static str, &str)]) -> Gauge {
        Gauge::from_arc(self.add_series(metric, own, SeriesReading::Level, f64::NAN.to_bits()))
    }

    fn add_series(
        &mut self,
        metric: Metric,
        own: &[(&'static str, &str)],
        reading: SeriesReading,
        bits: u64,
    ) -> Arc<AtomicU64> {
        let mut text = metric.name().to_owned();
        for (index, (name, value)) in self.labels.iter().chain(own).enumerate() {
            let open = if index == 0 { '{' } else { ',' };
            // Writing to a text does not fail.
            let _ = write!(text, "{open}{name}=\"{}\"", sanitize_label_value(value));
        }
        if text.len() > metric.name().len() {
            text.push('}');
        }
        let bits = Arc::new(AtomicU64::new(bits));
        self.series.push(MetricSeries { metric, text, bits: bits.clone(), reading });
        bits
    }

    /// The group of all handles that were made.
    pub(super) fn build_group(mut self) -> Arc<SeriesGroup> {
        self.series.sort_by_key(|series| series.metric as usize);
        Arc::new(SeriesGroup { series: self.series })
    }
}

impl MetricSeries {
    /// Adds the line of the series, if it has one now.
    /// The counter's bits, if it is one of that metric.
    fn read_bits(&self, metric: Metric) -> u64 {
        if self.metric == metric { self.bits.load(Ordering::Relaxed) } else { 0 }
    }

    fn write_line(&self, page: &mut String) -> bool {
        let bits = self.bits.load(Ordering::Relaxed);
        // Writing to a text does not fail.
        let _ = match self.reading {
            SeriesReading::Count => writeln!(page, "{} {bits}", self.text),
            SeriesReading::Nanoseconds => writeln!(page, "{} {}", self.text, bits as f64 / 1e9),
            SeriesReading::Level => {
                let level = f64::from_bits(bits);
                if level.is_nan() {
                    return false;
                }
                writeln!(page, "{} {level}", self.text)
            }
        };
        true
    }
}

/// Adds the series of all groups to a page: of each metric the header, then its samples.
pub(super) fn write_groups(groups: &[Arc<SeriesGroup>], page: &mut String) {
    // How far each group has been written.
    let mut written = vec![0; groups.len()];
    for metric in Metric::ALL {
        let before = page.len();
        let kind = format!("{:?}", metric.kind()).to_lowercase();
        write_help_line(page, metric.name(), None, None, metric.help());
        write_type_line(page, metric.name(), None, None, &kind);
        let mut any = false;
        for (group, written) in groups.iter().zip(&mut written) {
            let rest = &group.series[*written..];
            let count = rest.iter().take_while(|series| series.metric == *metric).count();
            *written += count;
            rest[..count].iter().for_each(|series| any |= series.write_line(page));
        }
        if any {
            page.push('\n');
        } else {
            page.truncate(before);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_level_without_a_value_has_neither_series_nor_header() {
        let mut builder = GroupBuilder::new(&[("device", "0")]);
        let slots = builder.gauge(Metric::PoolSlots, &[("tier", "a\"b\\")]);
        let busy = builder.seconds(Metric::DeviceBusySecondsTotal, &[]);
        let groups = [builder.build_group()];
        let page = || {
            let mut page = String::new();
            write_groups(&groups, &mut page);
            page
        };
        busy.add_time(Duration::from_millis(1500));
        let help = |metric: Metric| format!("# HELP {} {}\n", metric.name(), metric.help());
        let busy = format!(
            "{}# TYPE kvd_device_busy_seconds_total counter\n\
             kvd_device_busy_seconds_total{{device=\"0\"}} 1.5\n\n",
            help(Metric::DeviceBusySecondsTotal)
        );
        assert_eq!(page(), busy);
        slots.set(3.0);
        let slot = "kvd_pool_slots{device=\"0\",tier=\"a\\\"b\\\\\"} 3\n";
        assert!(page().starts_with(&busy) && page().contains(slot), "{}", page());
        slots.set(f64::NAN);
        assert_eq!(page(), busy);
    }
}
