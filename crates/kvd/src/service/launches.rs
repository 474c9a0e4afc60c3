//! How GPUs were given the kernels of attention, as a metric.

use crate::metrics::{Metric, Metrics};
use kvd_compute::Launches;

/// As a label, in the order of [`counts`].
pub(super) const LAUNCHED: [&str; 4] = ["kernel", "graph", "graph_made", "node_changed"];

fn counts(launches: &Launches) -> [u64; 4] {
    let Launches { kernels, graphs, graphs_built, nodes_updated, .. } = *launches;
    [kernels, graphs, graphs_built, nodes_updated]
}

/// Counts what came to a device between two looks, and says when it has no graphs any more.
pub(super) fn count_launches(metrics: &Metrics, before: &Launches, after: &Launches) {
    let pairs = counts(before).into_iter().zip(counts(after));
    for (how, (before, after)) in LAUNCHED.into_iter().zip(pairs) {
        if after > before {
            let counter = metrics.counter(Metric::GpuLaunchesTotal, &[("how", how)]);
            counter.increment(after - before);
        }
    }
    if let Some(reason) = after.graphs_off.as_ref().filter(|_| before.graphs_off.is_none()) {
        tracing::warn!(reason, "no CUDA graphs any more; kernels are launched one by one");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_came_between_is_counted_by_how() {
        let metrics = Metrics::new();
        let looks = [
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
        count_launches(&metrics, &Launches::default(), &looks[0]);
        looks.windows(2).for_each(|pair| count_launches(&metrics, &pair[0], &pair[1]));
        let text = metrics.render();
        for (how, count) in LAUNCHED.into_iter().zip([10, 3, 1, 2]) {
            let line = format!("kvd_gpu_launches_total{{how=\"{how}\"}} {count}\n");
            assert!(text.contains(&line), "{line} in {text}");
        }
    }
}
