//! A lane: the thread that owns one device, and the bounded queue in front of it.
//!
//! The lane thread is the only caller of its [`Backend`]. Jobs run one after another in the
//! order they were accepted, so bytes written by one are visible to all later ones without a
//! lock. A full queue is an answer, not a delay.

use crate::metrics::{Metric, Metrics};
use crate::service::{Call, ServiceError};
use kvd_compute::{Backend, DeviceInfo};
use kvd_core::ErrorCode;
use metrics::{Gauge, Histogram};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;
use tokio::sync::{mpsc, oneshot};

/// What the thread runs; `None` stands for a device that has failed.
type Job = Box<dyn FnOnce(Option<&mut dyn Backend>) + Send>;

/// Handle on a device's thread; clones share it.
#[derive(Clone)]
pub struct Lane {
    jobs: mpsc::Sender<Job>,
    failed: Arc<AtomicBool>,
    info: DeviceInfo,
    depth: Gauge,
    waited: Histogram,
}

/// The thread itself, to be joined after the last [`Lane`] is gone.
pub struct LaneThread(JoinHandle<()>);

impl LaneThread {
    /// Waits for the queue to run dry and the device to be given back.
    pub fn join(self) {
        // A panic of a job was caught and logged; one of the loop itself has nobody left to tell.
        let _ = self.0.join();
    }
}

impl Lane {
    /// Starts the thread. `on_failure` runs once, on the lane thread, if the device fails.
    ///
    /// # Errors
    /// When the operating system gives no thread.
    pub fn start(
        backend: Box<dyn Backend>,
        queue_jobs_max: usize,
        metrics: &Metrics,
        on_failure: impl FnOnce() + Send + 'static,
    ) -> std::io::Result<(Self, LaneThread)> {
        let (jobs, queue) = mpsc::channel(queue_jobs_max);
        let failed = Arc::new(AtomicBool::new(false));
        let info = backend.info();
        let lane = Self {
            jobs,
            failed: failed.clone(),
            info,
            depth: metrics.gauge(Metric::QueueDepth, &[]),
            waited: metrics.histogram(Metric::QueueSeconds, &[]),
        };
        let thread = std::thread::Builder::new()
            .name("kvd-lane".to_owned())
            .spawn(move || run(backend, queue, &failed, on_failure))?;
        Ok((lane, LaneThread(thread)))
    }

    /// What the device is.
    #[must_use]
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// Whether the device has failed.
    #[must_use]
    pub fn failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// Jobs accepted and not yet begun.
    #[must_use]
    pub fn queued(&self) -> usize {
        self.jobs.max_capacity() - self.jobs.capacity()
    }

    /// Runs `work` on the device and waits for its answer. Work that has begun is finished even
    /// if the caller goes away; work that has not is dropped.
    ///
    /// # Errors
    /// `QUEUE_FULL`, `DEADLINE_EXCEEDED` when the deadline passed before the work began,
    /// `DEVICE_FAILED`, or what `work` answers.
    pub async fn run<T, F>(&self, call: &Call, work: F) -> Result<T, ServiceError>
    where
        F: FnOnce(&mut dyn Backend) -> Result<T, ServiceError> + Send + 'static,
        T: Send + 'static,
    {
        call.check_deadline()?;
        let (reply, answer) = oneshot::channel();
        let (accepted, call, waited) = (Instant::now(), call.clone(), self.waited.clone());
        let job: Job = Box::new(move |backend| {
            waited.record(accepted.elapsed().as_secs_f64());
            if reply.is_closed() {
                return;
            }
            let result = match backend {
                None => Err(device_failed()),
                Some(backend) => call.check_deadline().and_then(|()| work(backend)),
            };
            // The caller may have left meanwhile; the work stands all the same.
            let _ = reply.send(result);
        });
        self.jobs.try_send(job).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => ServiceError::new(
                ErrorCode::QueueFull,
                format!(
                    "{} jobs wait for the device already; retry later or raise \
                     device.queue_jobs_max",
                    self.jobs.max_capacity()
                ),
            ),
            mpsc::error::TrySendError::Closed(_) => device_failed(),
        })?;
        self.depth.set(self.queued() as f64);
        answer.await.unwrap_or_else(|_| Err(device_failed()))
    }
}

fn device_failed() -> ServiceError {
    ServiceError::new(ErrorCode::DeviceFailed, "the device has failed; the daemon is going down")
}

fn run(
    mut backend: Box<dyn Backend>,
    mut queue: mpsc::Receiver<Job>,
    failed: &AtomicBool,
    on_failure: impl FnOnce(),
) {
    let mut on_failure = Some(on_failure);
    while let Some(job) = queue.blocking_recv() {
        if failed.load(Ordering::Acquire) {
            job(None);
            continue;
        }
        // After a panic the device's state is unknown: it is never called again.
        if catch_unwind(AssertUnwindSafe(|| job(Some(backend.as_mut())))).is_err() {
            failed.store(true, Ordering::Release);
            tracing::error!("a device job panicked; the lane is closed");
            if let Some(tell) = on_failure.take() {
                tell();
            }
        }
    }
}
