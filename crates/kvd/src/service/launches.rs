//! How GPUs were given the kernels of attention, as metrics.

use crate::metrics::{Metric, Metrics};
use kvd_compute::{DeviceInfo, Launches};

/// Each count with its metric and label. What is launched and what is done to graphs before have a
/// metric each, so that a sum over labels is a number of launches, or of changes.
const COUNTED: [(Metric, [(&str, &str); 1]); 4] = [
    (Metric::GpuLaunchesTotal, [("how", "kernel")]),
    (Metric::GpuLaunchesTotal, [("how", "graph")]),
    (Metric::GpuGraphChangesTotal, [("change", "graph_made")]),
    (Metric::GpuGraphChangesTotal, [("change", "node_changed")]),
];

/// In the order of [`COUNTED`].
fn list_counts(launches: &Launches) -> [u64; 4] {
    let Launches { kernels, graphs, graphs_built, nodes_updated, .. } = *launches;
    [kernels, graphs, graphs_built, nodes_updated]
}

/// Makes the metrics known before there is anything to count.
pub(super) fn describe_launches(metrics: &Metrics) {
    for (metric, label) in &COUNTED {
        metrics.counter(*metric, label).increment(0);
    }
}

/// Counts what came to a device between two looks, and says when it has no graphs any more.
pub(super) fn count_launches(
    metrics: &Metrics,
    device: impl FnOnce() -> DeviceInfo,
    before: &Launches,
    after: &Launches,
) {
    let pairs = list_counts(before).into_iter().zip(list_counts(after));
    for ((metric, label), (before, after)) in COUNTED.iter().zip(pairs) {
        if after > before {
            metrics.counter(*metric, label).increment(after - before);
        }
    }
    if let Some(reason) = after.graphs_off.as_ref().filter(|_| before.graphs_off.is_none()) {
        // Devices of one kind have one description.
        let DeviceInfo { description: device, uuid, .. } = device();
        tracing::warn!(
            device,
            uuid,
            reason,
            "no CUDA graphs on this GPU any more; its kernels are launched one by one"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use parking_lot::Mutex;
    use std::io::Write;
    use std::sync::Arc;

    fn gpu(uuid: &str) -> DeviceInfo {
        DeviceInfo { description: "H200".to_owned(), arena_bytes: 0, uuid: Some(uuid.to_owned()) }
    }

    #[test]
    fn launches_and_changes_of_graphs_are_counted_apart() {
        let metrics = Metrics::new();
        describe_launches(&metrics);
        let looks = [
            Launches::default(),
            Launches { kernels: 5, ..Launches::default() },
            Launches { kernels: 5, graphs: 1, graphs_built: 1, ..Launches::default() },
            Launches {
                kernels: 10,
                graphs: 3,
                graphs_built: 1,
                nodes_updated: 2,
                graphs_off: None,
            },
        ];
        let device = || -> DeviceInfo { unreachable!("nothing is said of it") };
        looks.windows(2).for_each(|pair| count_launches(&metrics, device, &pair[0], &pair[1]));
        let text = metrics.render_page();
        let mut lines: Vec<&str> =
            text.lines().filter(|line| line.starts_with("kvd_gpu")).collect();
        lines.sort_unstable();
        assert_eq!(
            lines,
            [
                "kvd_gpu_graph_changes_total{change=\"graph_made\"} 1",
                "kvd_gpu_graph_changes_total{change=\"node_changed\"} 2",
                "kvd_gpu_launches_total{how=\"graph\"} 3",
                "kvd_gpu_launches_total{how=\"kernel\"} 10",
            ]
        );
    }

    /// The lines of the log.
    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<u8>>>);

    impl Write for Log {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_gpu_that_has_no_graphs_any_more_is_named_once() {
        let log = Log::default();
        let writer = log.clone();
        let subscriber =
            tracing_subscriber::fmt().with_writer(move || writer.clone()).with_ansi(false).finish();
        let off =
            Launches { graphs_off: Some("build_graph: 801".to_owned()), ..Launches::default() };
        tracing::subscriber::with_default(subscriber, || {
            let metrics = Metrics::new();
            let on = Launches::default();
            count_launches(&metrics, || gpu("GPU-1"), &on, &on);
            count_launches(&metrics, || gpu("GPU-2"), &on, &off);
            count_launches(&metrics, || gpu("GPU-2"), &off, &off);
        });
        let text = String::from_utf8(log.0.lock().clone()).unwrap();
        assert_eq!(text.lines().count(), 1, "{text}");
        for wanted in ["WARN", "device=\"H200\"", "uuid=\"GPU-2\"", "build_graph: 801"] {
            assert!(text.contains(wanted), "{wanted}: {text}");
        }
    }
}
