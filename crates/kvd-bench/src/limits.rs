//! Limits of benchmarks: the most of each option, and of several together. They are checked before
//! memory is taken or threads are started, so that too much is an answer and no machine that stands
//! still.

use crate::{BenchError, HeadShape};
use kvd_compute::affinity;
use kvd_compute::{ArenaError, CpuOptions, OpenError};

/// Compute threads.
pub const THREADS_MAX: usize = CpuOptions::THREADS_MAX;
/// Sequences of a call, as queries of one `Attend`.
pub const BATCH_MAX: usize = 4096;
/// Query tokens of a sequence.
pub const QUERY_TOKENS_MAX: u32 = 1 << 16;
/// Tokens of a sequence or a prefill.
pub const CONTEXT_MAX: u32 = 1 << 24;
/// Turns.
pub const ROUNDS_MAX: usize = 100_000;
/// Calls of a turn of `bench transport`.
#[cfg(feature = "clients")]
pub const CALLS_MAX: usize = 1_000_000;
/// Writers beside `bench transport`.
#[cfg(feature = "clients")]
pub const WRITERS_MAX: usize = 64;
/// Tokens that a writer stores at a time, as of one `StoreBlocks` message.
#[cfg(feature = "clients")]
pub const STORING_TOKENS_MAX: u32 = 1 << 16;
/// Query tokens x stored tokens x query heads of one call: a prefill of 2048 tokens over 131072
/// with 32 heads. A call that long takes about a minute.
pub(crate) const WORK_MAX: u64 = 1 << 33;
/// Queries of one call.
pub(crate) const QUERY_BYTES_MAX: u64 = 256 << 20;
/// Book-keeping of a block in plans, at most.
const BLOCK_BYTES: u64 = 256;

/// As many threads as this process has cores, where the system says how many: more would measure
/// how they take turns.
///
/// # Errors
/// When there are more.
pub(crate) fn check_threads(most: usize) -> Result<(), BenchError> {
    let cores = affinity::allowed_cores().len();
    if cores > 0 && most > cores {
        return Err(BenchError::Threads { threads: most, cores });
    }
    Ok(())
}

/// The size of one call.
#[derive(Clone, Copy)]
pub(crate) struct CallSize {
    /// Query tokens of a sequence.
    pub(crate) query_tokens: u64,
    /// Stored tokens of all sequences.
    pub(crate) tokens: u64,
    /// Sequences.
    pub(crate) batch: u64,
}

/// Checks how much one call computes, and how many bytes of queries it has.
///
/// # Errors
/// When it is above [`WORK_MAX`] or [`QUERY_BYTES_MAX`].
pub(crate) fn check_call(shape: &HeadShape, call: CallSize) -> Result<(), BenchError> {
    let CallSize { query_tokens, tokens, batch } = call;
    let heads = u64::from(shape.kv_heads) * u64::from(shape.group);
    let within = |what, asked, max| {
        let options = "--context, --batch or --query-tokens";
        if asked > max { Err(BenchError::Limit { what, asked, max, options }) } else { Ok(()) }
    };
    let work = tokens.saturating_mul(query_tokens).saturating_mul(heads);
    within("query tokens x stored tokens x query heads of a call", work, WORK_MAX)?;
    let dim = u64::from(shape.head_dim_k.max(shape.head_dim_v));
    let bytes = batch.saturating_mul(query_tokens).saturating_mul(heads * dim * 2);
    within("bytes of the queries of a call", bytes, QUERY_BYTES_MAX)
}

/// Checks that there is memory for `blocks` pages or rows of so many bytes.
///
/// # Errors
/// When the machine has less.
pub(crate) fn check_memory(what: &str, blocks: u64, bytes: u64) -> Result<(), BenchError> {
    let bytes = blocks.saturating_mul(bytes.saturating_add(BLOCK_BYTES));
    match available_bytes() {
        Some(available) if bytes > available => {
            Err(BenchError::Memory { what: what.to_owned(), bytes, available })
        }
        _ => Ok(()),
    }
}

/// Bytes that this process could take now; none where the system does not say.
fn available_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let free = line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.saturating_mul(1024);
    // A container's own limit ("max" is none), and what it has of that already, but for files that
    // the system would give up.
    let of = |what: &str| std::fs::read_to_string(format!("/sys/fs/cgroup/memory.{what}")).ok();
    let number = |text: Option<String>| text.and_then(|text| text.trim().parse::<u64>().ok());
    let Some(limit) = number(of("max")) else { return Some(free) };
    let files = of("stat").and_then(|text| {
        text.lines().find_map(|line| line.strip_prefix("inactive_file ")?.parse::<u64>().ok())
    });
    let taken = number(of("current")).unwrap_or(0).saturating_sub(files.unwrap_or(0));
    Some(free.min(limit.saturating_sub(taken)))
}

/// A backend that could not be opened, in words of a benchmark: it has no configuration.
pub(crate) fn open_error(what: &str) -> impl FnOnce(OpenError) -> BenchError + '_ {
    move |error| match error {
        OpenError::Arena(ArenaError { bytes, source }) => BenchError::Failed {
            what: what.to_owned(),
            reason: format!("take {bytes} bytes of memory: {source}"),
        },
        other => BenchError::failed_step(what)(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::find_shape;

    #[test]
    fn more_threads_than_cores_are_refused_and_the_cores_named() {
        let cores = affinity::allowed_cores().len();
        check_threads(cores).unwrap();
        let error = check_threads(cores + 1).unwrap_err();
        let BenchError::Threads { threads, cores: of } = error else { panic!("{error}") };
        assert_eq!((threads, of), (cores + 1, cores));
    }

    #[test]
    fn a_call_is_as_long_as_its_limits_and_no_longer() {
        let shape = find_shape("llama-3.1-8b").unwrap();
        let call = |query_tokens, tokens, batch| CallSize { query_tokens, tokens, batch };
        check_call(&shape, call(2048, 131_072, 1)).unwrap();
        let refused = |queries, tokens, batch| {
            let error = check_call(&shape, call(queries, tokens, batch)).unwrap_err();
            assert!(error.is_usage(), "{error}");
            let BenchError::Limit { asked, max, .. } = error else { panic!("{error}") };
            assert!(asked > max, "{asked} {max}");
            max
        };
        assert_eq!(refused(2049, 131_072, 1), WORK_MAX);
        assert_eq!(refused(u64::MAX, 1, 1), WORK_MAX);
        assert_eq!(refused(1 << 16, 1, 1), QUERY_BYTES_MAX);
    }

    #[test]
    fn memory_that_is_not_there_is_not_taken() {
        check_memory("raw", 1, 4096).unwrap();
        let error = check_memory("raw", 1 << 40, u64::MAX).unwrap_err();
        assert!(error.is_usage() && error.to_string().contains("--buffer"), "{error}");
    }
}
