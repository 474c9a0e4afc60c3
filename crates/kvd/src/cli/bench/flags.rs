//! Parsers of the options of `kvd bench`. A refusal is an error of usage, which names what there is
//! instead.

use clap::builder::RangedU64ValueParser;
use kvd_bench::{ErrorMeasure, HeadShape, SHAPES, find_shape};
use kvd_compute::{CpuBackend, InstructionSet, Precision};

/// At least one of something, and at most so many.
pub(in crate::cli) fn count_up_to<T>(max: T) -> RangedU64ValueParser<T>
where
    T: TryInto<u64> + TryFrom<u64, Error: std::error::Error + Send + Sync>,
    T: Clone + Send + Sync + 'static,
{
    RangedU64ValueParser::new().range(1..=max.try_into().unwrap_or(u64::MAX))
}

/// None of something, or at most so many.
#[cfg(feature = "eval")]
pub(super) fn up_to(max: usize) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(..=max as u64)
}

pub(super) fn parse_shape(name: &str) -> Result<HeadShape, String> {
    find_shape(name).ok_or_else(|| {
        let names: Vec<_> = SHAPES.iter().map(|shape| shape.name).collect();
        format!(
            "shapes are {}, or numbers as 8x4x128: up to 1024 KV heads, query heads of each, and \
             channels, which are even",
            names.join(", ")
        )
    })
}

pub(super) fn parse_precision(name: &str) -> Result<Precision, String> {
    let known = Precision::ALL.into_iter().find(|precision| precision.name() == name);
    known.ok_or_else(|| "precisions are single, fast and int8".to_owned())
}

pub(super) fn parse_error_measure(name: &str) -> Result<ErrorMeasure, String> {
    let known = ErrorMeasure::ALL.into_iter().find(|measure| measure.measure_name() == name);
    known.ok_or_else(|| "errors are measured by rows, by queries or as none".to_owned())
}

/// One that this machine has.
pub(super) fn parse_instruction_set(name: &str) -> Result<InstructionSet, String> {
    let sets = CpuBackend::instruction_sets();
    sets.iter().copied().find(|set| set.name() == name).ok_or_else(|| {
        let names: Vec<_> = sets.iter().map(|set| set.name()).collect();
        format!("instruction sets of this machine are {}", names.join(", "))
    })
}
