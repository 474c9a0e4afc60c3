//! Which cores a thread may use.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The cores of this thread; none where the system does not say.
#[must_use]
pub fn allowed_cores() -> Vec<usize> {
    let Ok(allowed) = sched_getaffinity(None) else { return Vec::new() };
    (0..CpuSet::MAX_CPU).filter(|core| allowed.is_set(*core)).collect()
}

/// Keeps this thread, and those it starts from now on, on these cores.
///
/// # Errors
/// When the system refuses, as it does an empty list.
pub fn keep_on(cores: impl IntoIterator<Item = usize>) -> std::io::Result<()> {
    let mut chosen = CpuSet::new();
    cores.into_iter().for_each(|core| chosen.set(core));
    Ok(sched_setaffinity(None, &chosen)?)
}

/// Keeps compute thread number `thread` on one of `cores`, in turns where there are more threads.
/// Two that are woken together on one core would otherwise share it until the scheduler looks
/// again, milliseconds later. Without cores it stays where it is.
///
/// # Errors
/// As [`keep_on`].
pub fn keep_on_one(cores: &[usize], thread: usize) -> std::io::Result<()> {
    cores.get(thread % cores.len().max(1)).map_or(Ok(()), |core| keep_on([*core]))
}

#[cfg(test)]
mod tests {
    use super::{allowed_cores, keep_on, keep_on_one};

    #[test]
    fn a_pinned_thread_is_on_the_core_of_its_number() {
        let all = allowed_cores();
        for thread in 0..2 * all.len() {
            let pinned = std::thread::scope(|scope| {
                let run = || {
                    keep_on_one(&all, thread).unwrap();
                    allowed_cores()
                };
                scope.spawn(run).join().unwrap()
            });
            assert_eq!(pinned, [all[thread % all.len()]]);
        }
    }

    #[test]
    fn no_cores_leave_a_thread_where_it_is() {
        let all = allowed_cores();
        keep_on_one(&[], 3).unwrap();
        assert!(keep_on([]).is_err());
        assert_eq!(allowed_cores(), all);
    }
}
