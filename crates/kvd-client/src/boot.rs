//! The boot of the daemon that a client knows, so that a restart is noticed.
#![expect(clippy::disallowed_types, reason = "the client depends on no other lock")]

use crate::error::{ClientError, DaemonRestart};
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
}
