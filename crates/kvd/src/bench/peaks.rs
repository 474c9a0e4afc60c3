//! How many products the machine makes at most, by instruction set: what figures are set against.

use super::measure::{Figure, timed};
use kvd_compute::{InstructionSet, MultiplyKind, multiply_adds};

/// Products of the first measurement; the others have as many as take [`LEAST_NS`].
const COUNT: usize = 4 << 20;
const COUNT_MAX: usize = COUNT << 10;
/// Beside it reading the clock is nothing, and wide units have their pace.
const LEAST_NS: f64 = 1e6;

/// Those that were asked for, measured once each.
#[derive(Default)]
pub(super) struct Peaks(Vec<((InstructionSet, MultiplyKind), Option<f64>)>);

impl Peaks {
    /// Multiplications with additions that one thread makes in a nanosecond (median); `None` where
    /// that is not measured.
    pub(super) fn per_ns(&mut self, set: InstructionSet, products: MultiplyKind) -> Option<f64> {
        let key = (set, products);
        if let Some((_, peak)) = self.0.iter().find(|(known, _)| *known == key) {
            return *peak;
        }
        let peak = peak(set, products).map(|figure| figure.median);
        self.0.push((key, peak));
        peak
    }
}

/// The same with its spread.
pub(super) fn peak(set: InstructionSet, products: MultiplyKind) -> Option<Figure> {
    let run = |count| {
        let (count, cpu, _) = timed(|| multiply_adds(set, products, count));
        Some((cpu, cpu / count? as f64))
    };
    let mut count = COUNT;
    while count < COUNT_MAX && run(count)?.0 < LEAST_NS {
        count *= 2;
    }
    let runs: Option<Vec<f64>> = (0..9).map(|_| run(count).map(|(_, ns)| ns)).collect();
    Some(Figure::of(runs?).inverse())
}
