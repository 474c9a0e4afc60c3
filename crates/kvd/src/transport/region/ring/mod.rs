//! The ring of a region: attends as records in its memory, without a message (`docs/contract.md`,
//! "The ring"). A thread of the daemon takes records, tests and plans them, and gives them to the
//! device's queue as any call; the device's thread writes the answer and its end. The worker may
//! write anything at any time: it harms its own region alone.

mod answer;
mod rows;
mod serve;

use super::WorkerRegion;
use crate::service::{Service, ServiceError};
use answer::RingAnswers;
use kvd_core::ErrorCode;
use kvd_proto::v1;
use kvd_shm::ring::{AdaptiveSpin, RingIntake, RingPlace};
use rows::RowMemory;
use serve::RingThread;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use tokio::sync::oneshot;

/// Phases of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum RingPhase {
    Open,
    /// Records that were written are answered, and then it ends.
    Draining,
    /// It ends, with what is under way.
    Cut,
}

/// The phase, as the thread sees it.
#[derive(Debug, Default)]
struct PhaseCell(AtomicU8);

impl PhaseCell {
    fn set_phase(&self, phase: RingPhase) {
        self.0.fetch_max(phase as u8, Ordering::SeqCst);
    }

    fn read_phase(&self) -> RingPhase {
        match self.0.load(Ordering::SeqCst) {
            0 => RingPhase::Open,
            1 => RingPhase::Draining,
            _ => RingPhase::Cut,
        }
    }
}

/// A ring that is served until this is dropped.
pub(super) struct ServedRing {
    phase: Arc<PhaseCell>,
    answers: Arc<RingAnswers>,
    ended: oneshot::Receiver<ServiceError>,
}

impl ServedRing {
    /// Serves the ring at a place of a region.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` where none can be there; `LIMIT_EXCEEDED`.
    pub(super) fn open_ring(
        service: &Arc<Service>,
        region: &WorkerRegion,
        asked: v1::RegionRing,
    ) -> Result<Self, ServiceError> {
        let call = region.caller.call_context();
        region.caller.admit_call(service, &call, "AttendRegion")?;
        service.admit_call(&call)?;
        let v1::RegionRing { offset, entries, first } = asked;
        let max = service.config().rings.entries_max;
        if entries > max {
            let message =
                format!("a ring of {entries} records is over limits.ring_entries_max = {max}");
            return Err(ServiceError::new(ErrorCode::LimitExceeded, message));
        }
        let place = RingPlace { offset, entries, first };
        place.check_place(&region.memory)?;
        let (tell, ended) = oneshot::channel();
        let phase = Arc::<PhaseCell>::default();
        let answers = Arc::new(RingAnswers::new(region.memory.clone(), place, service.metrics()));
        let thread = RingThread {
            service: service.clone(),
            caller: region.caller.clone(),
            memory: region.memory.clone(),
            intake: RingIntake::over_memory(region.memory.clone(), place),
            answers: answers.clone(),
            phase: phase.clone(),
            under_way: Vec::new(),
            rows: RowMemory::default(),
            spin: AdaptiveSpin::up_to(service.config().rings.spin),
        };
        let build = std::thread::Builder::new().name("kvd-ring".to_owned());
        let started = build.spawn(move || {
            if let Err(error) = thread.serve_ring() {
                // The connection may be gone already.
                let _ = tell.send(error.into());
            }
        });
        started.map_err(|error| {
            ServiceError::new(ErrorCode::LimitExceeded, format!("a thread for the ring: {error}"))
        })?;
        Ok(Self { phase, answers, ended })
    }

    /// Waits until the worker has broken the ring; says how.
    pub(super) async fn wait_broken(ring: &mut Option<Self>) -> ServiceError {
        match ring {
            None => std::future::pending().await,
            Some(ring) => (&mut ring.ended).await.unwrap_or_else(|_| {
                ServiceError::new(ErrorCode::Internal, "the thread of the ring has ended")
            }),
        }
    }

    /// Answers what was written, and ends.
    pub(super) async fn drain_ring(mut self) {
        self.change_phase(RingPhase::Draining);
        // Ends with the thread, either way.
        let _ = (&mut self.ended).await;
    }

    fn change_phase(&self, phase: RingPhase) {
        self.phase.set_phase(phase);
        self.answers.wake_thread();
    }
}

impl Drop for ServedRing {
    fn drop(&mut self) {
        self.change_phase(RingPhase::Cut);
    }
}
