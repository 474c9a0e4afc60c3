//! How many products the machine makes at most, by instruction set: what figures are set against.

use super::measure::{Figure, timed};
use kvd_compute::{InstructionSet, Products, multiply_adds};

/// Products of one measurement: about a millisecond.
const COUNT: usize = 4 << 20;

/// Those that were asked for, measured once each.
#[derive(Default)]
pub(super) struct Peaks(Vec<((InstructionSet, Products), Option<f64>)>);

impl Peaks {
    /// Multiplications with additions that one thread makes in a nanosecond (median); `None` where
    /// that is not measured.
    pub(super) fn per_ns(&mut self, set: InstructionSet, products: Products) -> Option<f64> {
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
pub(super) fn peak(set: InstructionSet, products: Products) -> Option<Figure> {
    let run = |_| {
        let (count, cpu, _) = timed(|| multiply_adds(set, products, COUNT));
        Some(cpu / count? as f64)
    };
    let runs: Option<Vec<f64>> = (0..9).map(run).collect();
    Some(Figure::of(runs?).inverse())
}
