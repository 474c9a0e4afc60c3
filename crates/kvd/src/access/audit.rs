//! The audit log: who was refused, and what operators did. It is rate-limited, and holds neither
//! payloads nor tokens.

use super::AccessRequest;
use kvd_core::ErrorCode;
use parking_lot::Mutex;
use std::time::{Duration, Instant};

/// Where its lines go in `log.filter`: `kvd::audit=info`.
const TARGET: &str = "kvd::audit";

/// Length of a window in which so many lines are written.
const WINDOW: Duration = Duration::from_secs(1);

/// Lines of refusals and of administrative calls.
pub(crate) struct AuditLog {
    lines_max: u32,
    window: Mutex<LineWindow>,
}

struct LineWindow {
    began: Instant,
    lines: u32,
    /// Events without a line since the last one.
    left_out: u64,
}

/// A call that was refused.
pub(super) struct RefusedCall<'a> {
    pub(super) request: &'a AccessRequest<'a>,
    /// Absent where nobody was found.
    pub(super) principal: Option<&'a str>,
    pub(super) code: ErrorCode,
}

impl AuditLog {
    /// One that writes at most so many lines a second.
    pub(crate) fn new(lines_max: u32) -> Self {
        let window = LineWindow { began: Instant::now(), lines: 0, left_out: 0 };
        Self { lines_max, window: Mutex::new(window) }
    }

    /// The right to write a line, and how many events before it had none.
    fn take_line(&self, now: Instant) -> Option<u64> {
        let mut window = self.window.lock();
        if now.saturating_duration_since(window.began) >= WINDOW {
            (window.began, window.lines) = (now, 0);
        }
        if window.lines >= self.lines_max {
            window.left_out += 1;
            return None;
        }
        window.lines += 1;
        Some(std::mem::take(&mut window.left_out))
    }

    pub(super) fn log_refusal(&self, refusal: &RefusedCall<'_>) {
        let Some(left_out) = self.take_line(Instant::now()) else { return };
        let RefusedCall { request, principal, code } = refusal;
        tracing::warn!(
            target: TARGET,
            rpc = request.rpc,
            principal,
            peer = %request.peer,
            uid = request.peer.peer_uid(),
            namespace = request.namespace.as_str(),
            %code,
            left_out,
            "refused"
        );
    }

    pub(super) fn log_call(&self, request: &AccessRequest<'_>, principal: Option<&str>) {
        let Some(left_out) = self.take_line(Instant::now()) else { return };
        tracing::info!(
            target: TARGET,
            rpc = request.rpc,
            principal,
            peer = %request.peer,
            uid = request.peer.peer_uid(),
            namespace = request.namespace.as_str(),
            left_out,
            "administrative call"
        );
    }

    /// Tells that files were read anew, or why they were not.
    pub(crate) fn log_reload(&self, what: &str, error: Option<&str>) {
        match error {
            None => tracing::info!(target: TARGET, what, "read anew"),
            Some(error) => tracing::error!(
                target: TARGET,
                what,
                error,
                "cannot be read anew; what was read before stays in force"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_writes_few_lines_which_count_the_rest() {
        let (log, now) = (AuditLog::new(2), Instant::now());
        let taken: Vec<_> = (0..5).map(|_| log.take_line(now)).collect();
        assert_eq!(taken, [Some(0), Some(0), None, None, None]);
        assert_eq!(log.take_line(now + WINDOW * 2), Some(3));
        assert_eq!(log.take_line(now + WINDOW * 2), Some(0));
    }
}
