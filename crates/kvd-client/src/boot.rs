//! The boot of the daemon that a client knows, so that a restart is noticed.
#![expect(clippy::disallowed_types, reason = "the client depends on no other lock")]

use crate::error::{ClientError, DaemonRestart};
use kvd_core::ErrorCode;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// The boot id that was seen last; none before the first.
#[derive(Debug, Default)]
pub(crate) struct KnownBoot(Mutex<Option<String>>);

impl KnownBoot {
    pub(crate) fn get(&self) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Remembers the boot id of an answer.
    ///
    /// # Errors
    /// When it is another than before; the next call compares with this one.
    pub(crate) fn compare_boot(&self, now: &str) -> Result<(), ClientError> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match known.replace(now.to_owned()) {
            Some(before) if before != now => Err(ClientError::other_boot(&before, now)),
            _ => Ok(()),
        }
    }

    /// Completes the old boot id of an error, of which ids carry the beginning alone, and
    /// remembers the new one.
    pub(crate) fn complete_error(&self, error: &mut ClientError) {
        let Some(DaemonRestart { old, new }) = &mut error.restarted else { return };
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let before = known.replace(new.clone());
        if let Some(before) = before.filter(|before| before.starts_with(old.as_str())) {
            *old = before;
        }
    }
}

/// The digits of a boot id that ids carry.
const ID_BOOT_DIGITS: usize = 8;

/// The boot of the first id that is of another than `boot_id`, as ids write it.
fn other_boot(boot_id: &str, ids: impl IntoIterator<Item = u64>) -> Option<String> {
    let digits = boot_id.get(..ID_BOOT_DIGITS)?;
    let own = u32::from_str_radix(digits, 16).ok()?;
    // Small numbers are no boot's.
    let is_other = |id: &u64| id >> 32 != 0 && (id >> 32) as u32 != own;
    ids.into_iter().find(is_other).map(|id| format!("{:08x}", id >> 32))
}

/// Calls of a region whose ids are of another boot than its daemon's: a completion record has no
/// room to say so.
#[derive(Debug, Default)]
pub(crate) struct StaleCalls(Mutex<BTreeMap<u64, String>>);

impl StaleCalls {
    /// Most calls that are remembered; of further ones the refusal alone is told.
    const CALLS_MAX: usize = 1024;

    /// A call with these ids, by its completion record, to the daemon of `boot_id`.
    pub(crate) fn note_call(&self, done: u64, boot_id: &str, ids: impl IntoIterator<Item = u64>) {
        let mut calls = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        calls.remove(&done);
        if let Some(old) = other_boot(boot_id, ids).filter(|_| calls.len() < Self::CALLS_MAX) {
            calls.insert(done, old);
        }
    }

    /// Completes the error that such a call ended with.
    pub(crate) fn explain_error(
        &self,
        done: u64,
        boot_id: &str,
        mut error: ClientError,
    ) -> ClientError {
        let old = self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&done);
        let is_unknown =
            matches!(error.code, Some(ErrorCode::UnknownModel | ErrorCode::UnknownSequence));
        let new = || boot_id.to_owned();
        error.restarted = old.filter(|_| is_unknown).map(|old| DaemonRestart { old, new: new() });
        error
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_boot_is_told_once_and_then_known() {
        let known = KnownBoot::default();
        known.compare_boot("a").unwrap();
        known.compare_boot("a").unwrap();
        let error = known.compare_boot("b").unwrap_err();
        let restarted = error.restarted.clone().unwrap();
        assert_eq!((restarted.old.as_str(), restarted.new.as_str()), ("a", "b"));
        assert!(error.is_retryable(), "a call without old ids succeeds");
        known.compare_boot("b").unwrap();
        assert_eq!(known.get().as_deref(), Some("b"));
    }

    #[test]
    fn the_old_boot_id_is_completed_from_what_ids_carry() {
        let (old, new) = ("01".repeat(16), "02".repeat(16));
        let known = KnownBoot::default();
        known.compare_boot(&old).unwrap();
        let mut error = ClientError::other_boot(&old[..8], &new);
        known.complete_error(&mut error);
        assert_eq!(error.restarted.unwrap().old, old);
        known.compare_boot(&new).unwrap();
    }

    #[test]
    fn calls_with_ids_of_another_boot_are_explained_and_others_are_not() {
        let boot = "0a0b0c0d".repeat(4);
        let calls = StaleCalls::default();
        let refused = |code| ClientError::new(code, "refused");
        let unknown = ErrorCode::UnknownSequence;
        calls.note_call(0, &boot, [0x0a0b_0c0d_0000_0001, 7]);
        assert_eq!(calls.explain_error(0, &boot, refused(unknown)).restarted, None);
        for (code, is_restart) in [(unknown, true), (ErrorCode::ShuttingDown, false)] {
            calls.note_call(64, &boot, [7, 0x0a0b_0c0e_0000_0001]);
            let restarted = calls.explain_error(64, &boot, refused(code)).restarted;
            assert_eq!(restarted.is_some(), is_restart);
            assert!(
                restarted
                    .is_none_or(|told| (told.old, told.new) == ("0a0b0c0e".into(), boot.clone()))
            );
        }
        // A daemon that says nothing of its boot; a record that is used again.
        calls.note_call(0, "", [1 << 40]);
        assert_eq!(calls.explain_error(0, "", refused(unknown)).restarted, None);
        calls.note_call(0, &boot, [1 << 40]);
        calls.note_call(0, &boot, [7]);
        assert_eq!(calls.explain_error(0, &boot, refused(unknown)).restarted, None);
        (0..5000).for_each(|done| calls.note_call(done, &boot, [1 << 40]));
        assert_eq!(calls.0.lock().unwrap().len(), StaleCalls::CALLS_MAX);
    }
}
