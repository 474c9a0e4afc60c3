//! Says to a service manager (`Type=notify` of systemd) that the daemon serves, is alive and ends.
//! Without one (`NOTIFY_SOCKET`) nothing is said.

use crate::daemon::RunningDaemon;
use sd_notify::NotifyState;
use std::time::Duration;
use tokio::task::JoinHandle;

/// Signs of life in the time after which the manager takes the daemon to hang.
const SIGNS_PER_TIMEOUT: u32 = 3;

/// The manager's line while the daemon serves; dropping it ends the signs of life.
pub(super) struct SupervisorLink {
    watchdog: Option<JoinHandle<()>>,
}

impl SupervisorLink {
    /// Says that the daemon serves, and gives signs of life from now on where they are wanted: on
    /// the threads that answer requests, so that they end when those hang.
    pub(super) fn announce_ready(running: &RunningDaemon) -> Self {
        let tcp = running.bound_addresses().tcp;
        let place = tcp.map_or_else(|| "its sockets".to_owned(), |address| address.to_string());
        tell_manager(&[NotifyState::Ready, NotifyState::Status(&format!("serves at {place}"))]);
        let timeout = sd_notify::watchdog_enabled();
        Self { watchdog: timeout.map(|timeout| tokio::spawn(give_signs(timeout))) }
    }

    /// Says that the daemon drains. It still gives signs of life.
    pub(super) fn announce_stop(&self) {
        tell_manager(&[NotifyState::Stopping, NotifyState::Status("drains")]);
    }
}

impl Drop for SupervisorLink {
    fn drop(&mut self) {
        self.watchdog.iter().for_each(JoinHandle::abort);
    }
}

async fn give_signs(timeout: Duration) {
    let interval = (timeout / SIGNS_PER_TIMEOUT).max(Duration::from_millis(1));
    loop {
        tell_manager(&[NotifyState::Watchdog]);
        tokio::time::sleep(interval).await;
    }
}

/// A manager that does not listen is no reason to end: it finds out by its own times.
fn tell_manager(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::warn!(%error, "the service manager (NOTIFY_SOCKET) cannot be told");
    }
}
