//! `kvd serve`: until a signal or the device's end.

use super::CliError;
use super::supervisor::SupervisorLink;
use crate::config::{Config, describe_unread_variables};
use crate::daemon::Daemon;
use crate::descriptors;
use crate::telemetry;
use rustix::process::Signal as SignalNumber;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::Notify;

pub(super) async fn run_daemon(config: Config) -> Result<(), CliError> {
    let traces = telemetry::init_telemetry(&config)?;
    for sentence in describe_unread_variables() {
        tracing::warn!("{sentence}");
    }
    descriptors::raise_limit();
    // Before the daemon takes its time to build, and held through the drain: no signal falls
    // between two listeners.
    let mut signals = StopSignals::new().map_err(anyhow::Error::from)?;
    let reload = Arc::new(ReloadSlot::default());
    outlive_other_signals(reload.clone()).map_err(anyhow::Error::from)?;
    let mut building = tokio::spawn(Daemon::build(config));
    let running = tokio::select! {
        built = &mut building => built.map_err(anyhow::Error::from)??.spawn(),
        _ = signals.next() => {
            tracing::info!("a signal before the daemon served: exit");
            building.abort();
            // What is bound takes its socket files along. A device that is being opened is not
            // waited for, as returning would.
            let _ = tokio::time::timeout(UNBIND_TIME, building).await;
            std::process::exit(0)
        }
    };
    let _ = reload.set(running.file_reload());
    let supervisor = SupervisorLink::announce_ready(&running);
    let outcome = tokio::select! {
        _ = signals.next() => Ok(()),
        () = running.device_failed() => Err(CliError::DeviceFailed),
    };
    supervisor.announce_stop();
    let drain = async {
        running.drain().await;
        if let Some(traces) = traces {
            traces.end_thread().await;
        }
    };
    tokio::select! {
        () = drain => outcome,
        _ = signals.next() => {
            tracing::warn!("a signal during the drain: exit at once");
            // Returning would wait for the device's job and for blocking tasks.
            std::process::exit(1)
        }
    }
}

/// How long a daemon that never served may take to remove its sockets.
const UNBIND_TIME: Duration = Duration::from_millis(500);

/// Where SIGHUP finds the daemon once it serves.
type ReloadSlot = OnceLock<Arc<Notify>>;

/// Keeps signals that end a process by default from ending the daemon, and with it all that it
/// holds: SIGHUP of a closed terminal or of a reload, SIGUSR1, SIGUSR2, timers and SIGIO of a
/// mistaken sender, SIGXFSZ of a file that reached its limit, whose write fails by itself, signals
/// of real time. SIGHUP has the files of doors read anew.
///
/// Signals of a fault of the program itself (SIGSEGV, SIGABRT and their like) end it, as do those
/// that no program can catch: SIGKILL, and 32 and 33, which belong to the C library.
fn outlive_other_signals(reload: Arc<ReloadSlot>) -> std::io::Result<()> {
    let mut hangup = signal(SignalKind::hangup())?;
    for (name, kind) in ignored_signals() {
        let mut ignored = signal(kind)?;
        tokio::spawn(async move {
            while ignored.recv().await.is_some() {
                tracing::debug!("{name} is ignored");
            }
        });
    }
    outlive_last_signal()?;
    tokio::spawn(async move {
        loop {
            hangup.recv().await;
            tracing::info!(
                "SIGHUP: certificates and principals are read anew; the rest of the configuration \
                 stays as it was at the start"
            );
            if let Some(reload) = reload.get() {
                reload.notify_one();
            }
        }
    });
    Ok(())
}

/// Signals of real time, from `SIGRTMIN`; tokio has no place for the last one, `SIGRTMAX`.
const REAL_TIME: std::ops::Range<i32> = 34..64;

/// Signals that are looked at no further.
fn ignored_signals() -> Vec<(String, SignalKind)> {
    let named = [
        ("SIGUSR1", SignalKind::user_defined1()),
        ("SIGUSR2", SignalKind::user_defined2()),
        ("SIGALRM", SignalKind::alarm()),
        ("SIGVTALRM", raw_kind(SignalNumber::VTALARM)),
        ("SIGPROF", raw_kind(SignalNumber::PROF)),
        ("SIGIO", SignalKind::io()),
        ("SIGXFSZ", raw_kind(SignalNumber::XFSZ)),
        ("SIGSTKFLT", raw_kind(SignalNumber::STKFLT)),
    ];
    let named = named.into_iter().map(|(name, kind)| (name.to_owned(), kind));
    let of_real_time = |number: i32| {
        (format!("SIGRTMIN+{}", number - REAL_TIME.start), SignalKind::from_raw(number))
    };
    named.chain(REAL_TIME.map(of_real_time)).collect()
}

/// Catches `SIGRTMAX` and does nothing about it.
fn outlive_last_signal() -> std::io::Result<()> {
    signal_hook::flag::register(REAL_TIME.end, Arc::default()).map(drop)
}

/// Does what [`outlive_other_signals`] does, before anything that takes time: files are read after
/// it, so that SIGHUP asks for nothing yet.
pub(super) fn outlive_early_signals() -> std::io::Result<()> {
    // A handler stays for as long as the process lives, whatever becomes of this runtime.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    runtime.block_on(async {
        let kinds = ignored_signals().into_iter().map(|(_, kind)| kind);
        let mut kinds = kinds.chain([SignalKind::hangup()]);
        kinds.try_for_each(|kind| signal(kind).map(drop))?;
        outlive_last_signal()
    })
}

fn raw_kind(number: SignalNumber) -> SignalKind {
    SignalKind::from_raw(number.as_raw())
}

/// SIGTERM from a supervisor, SIGINT and SIGQUIT from a terminal, SIGPWR from a container's host
/// or a power supply, SIGXCPU where the processor time runs out.
struct StopSignals {
    terminate: Signal,
    interrupt: Signal,
    quit: Signal,
    power: Signal,
    cpu_time: Signal,
}

impl StopSignals {
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            quit: signal(SignalKind::quit())?,
            power: signal(raw_kind(SignalNumber::POWER))?,
            cpu_time: signal(raw_kind(SignalNumber::XCPU))?,
        })
    }

    /// The number of the next one.
    async fn next(&mut self) -> i32 {
        let kind = tokio::select! {
            _ = self.terminate.recv() => SignalKind::terminate(),
            _ = self.interrupt.recv() => SignalKind::interrupt(),
            _ = self.quit.recv() => SignalKind::quit(),
            _ = self.power.recv() => raw_kind(SignalNumber::POWER),
            _ = self.cpu_time.recv() => raw_kind(SignalNumber::XCPU),
        };
        kind.as_raw_value()
    }
}

/// Waits for the first such signal from now on, and gives its number.
#[cfg(feature = "eval")]
pub(super) async fn stop_signal() -> std::io::Result<i32> {
    Ok(StopSignals::new()?.next().await)
}
