//! The most products that the machine makes, by instruction set: figures are set against them.

use crate::measure::{MeasuredFigure, measure_time};
use kvd_compute::{InstructionSet, MultiplyKind, multiply_adds};

/// Products of the first measurement; the others have as many as take [`LEAST_NS`].
const COUNT: usize = 4 << 20;
const COUNT_MAX: usize = COUNT << 10;
/// Beside it reading the clock is nothing, and wide units have their pace.
const LEAST_NS: f64 = 1e6;

/// Peaks that were asked for, measured once each.
#[derive(Default)]
pub(crate) struct KnownPeaks(Vec<((InstructionSet, MultiplyKind), Option<f64>)>);

impl KnownPeaks {
    /// Multiplications with additions that one thread makes in a nanosecond (median); `None` where
    /// that is not measured.
    pub(crate) fn per_ns(&mut self, set: InstructionSet, products: MultiplyKind) -> Option<f64> {
        let key = (set, products);
        if let Some((_, peak)) = self.0.iter().find(|(known, _)| *known == key) {
            return *peak;
        }
        let peak = measure_peak(set, products).map(|figure| figure.median);
        self.0.push((key, peak));
        peak
    }
}

/// Measures such products per nanosecond, with their spread.
pub(crate) fn measure_peak(set: InstructionSet, products: MultiplyKind) -> Option<MeasuredFigure> {
    let run = |count| {
        let timed = measure_time(|| multiply_adds(set, products, count));
        Some((timed.cpu_ns, timed.cpu_ns / timed.value? as f64))
    };
    let mut count = COUNT;
    while count < COUNT_MAX && run(count)?.0 < LEAST_NS {
        count *= 2;
    }
    let runs: Option<Vec<f64>> = (0..9).map(|_| run(count).map(|(_, ns)| ns)).collect();
    Some(MeasuredFigure::from_runs(runs?).to_rate())
}
