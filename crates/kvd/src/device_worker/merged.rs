//! Attends of several callers in one pass: those that wait when it begins and read mostly the same
//! pages. Each keeps its owner, its deadline and its caller; it pays for its share of the time.

use super::job::{AskedWork, DeviceJob, JobCaller};
use super::{QueuedJob, QueuedWork};
use crate::scheduler::{JobTicket, WaitingJob};
use crate::service::ServiceError;
use crate::service::jobs::AttendJob;
use kvd_compute::{AttendPlan, AttendTask, Attended, Backend, BackendError, Stop, StopReason};
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Who waits for the answer of an attend.
type AttendCaller = JobCaller<<AttendJob as super::DeviceWork>::Reply>;

/// Attends in one plan.
pub(super) struct MergedAttends {
    task: AttendTask,
    members: Vec<MergedMember>,
    /// Callers that were not there any more.
    unheard: u64,
}

/// An attend in a plan of several.
struct MergedMember {
    ticket: JobTicket,
    entry: MemberEntry,
    /// Kept until the pass ends: the plan names what it pins.
    work: AttendJob,
    /// None once it is answered, or gone.
    caller: Option<AttendCaller>,
    /// Its queries, and their tokens, in the plan.
    queries: Range<usize>,
    tokens: Range<usize>,
    /// Its part of the scores.
    share: f64,
}

/// A [`QueuedJob`] without its work: what is known of its caller.
type MemberEntry = QueuedJob<()>;

/// State of merged attends that had the device.
pub(super) enum MergedStep {
    /// They go on later.
    Paused(Box<MergedAttends>),
    /// All were answered; how many callers were not there to hear it.
    Done { unheard: u64 },
    /// The pass failed: each is to be asked alone, so that whose fault it was is told to them only.
    Apart { jobs: Vec<WaitingJob<QueuedJob>>, unheard: u64 },
}

/// The plan of a job, where it is an attend that may go with others: it is whole, and its caller
/// is there.
pub(super) fn mergeable_plan(entry: &QueuedJob) -> Option<&AttendPlan> {
    let is_free = entry.cost.is_zero() && !entry.alone && !entry.cancelled.load(Ordering::Acquire);
    match &entry.job {
        QueuedWork::One(DeviceJob::Attend(asked)) if is_free => Some(asked.work.asked_plan()),
        _ => None,
    }
}

/// Some jobs, as one where they are attends that [`mergeable_plan`] has a plan of.
pub(super) fn merge_jobs(jobs: Vec<WaitingJob<QueuedJob>>) -> Vec<WaitingJob<QueuedJob>> {
    let plans: Vec<&AttendPlan> =
        jobs.iter().filter_map(|waiting| mergeable_plan(&waiting.job)).collect();
    let plan = if plans.len() == jobs.len() { AttendPlan::join_plans(&plans) } else { None };
    let (Some(plan), Some(first)) = (plan, jobs.iter().min_by_key(|waiting| waiting.ticket.serial))
    else {
        return jobs;
    };
    // A place is not taken from what has begun.
    let ticket = JobTicket { is_counted: false, ..first.ticket.clone() };
    let all = plan.scores().max(1) as f64;
    let (mut query, mut token) = (0, 0);
    let mut members = Vec::with_capacity(jobs.len());
    for WaitingJob { ticket, job: entry } in jobs {
        let (entry, job) = entry.swap_work(());
        // Looked at above: all are attends.
        let QueuedWork::One(DeviceJob::Attend(asked)) = job else { continue };
        let AskedWork { work, caller } = *asked;
        let own = work.asked_plan();
        let queries = query..query + own.queries.len();
        let tokens = token..token + own.query_tokens();
        let share = own.scores() as f64 / all;
        (query, token) = (queries.end, tokens.end);
        let caller = Some(caller);
        members.push(MergedMember { ticket, entry, work, caller, queries, tokens, share });
    }
    let merged = MergedAttends { task: AttendTask::new(plan), members, unheard: 0 };
    let entry = QueuedJob {
        // Never nothing: a cost tells jobs that have begun.
        cost: Duration::from_nanos(1),
        ..QueuedJob::new(QueuedWork::Merged(Box::new(merged)), None)
    };
    vec![WaitingJob { ticket, job: entry }]
}

impl MergedAttends {
    /// How many were merged.
    pub(super) fn count_members(&self) -> usize {
        self.members.len()
    }

    /// When the first deadline of those that wait passes.
    pub(super) fn first_deadline(&self) -> Option<Instant> {
        let waiting = self.members.iter().filter(|member| member.caller.is_some());
        waiting.filter_map(|member| member.entry.deadline).min()
    }

    /// The owners that wait, and what part of the time each pays for.
    pub(super) fn each_share(&self) -> Vec<TimeShare> {
        let waiting = self.members.iter().filter(|member| member.caller.is_some());
        let all: f64 = waiting.clone().map(|member| member.share).sum();
        let even = 1.0 / waiting.clone().count().max(1) as f64;
        let of = |member: &MergedMember| TimeShare {
            ticket: member.ticket.clone(),
            part: if all > 0.0 { member.share / all } else { even },
        };
        waiting.map(of).collect()
    }

    /// Goes on with the pass.
    pub(super) fn run_merged(
        mut self: Box<Self>,
        backend: &mut dyn Backend,
        stop: &Stop,
    ) -> MergedStep {
        self.let_go();
        if self.members.iter().all(|member| member.caller.is_none()) {
            return MergedStep::Done { unheard: self.unheard };
        }
        let began = Instant::now();
        let result = backend.attend_slice(&mut self.task, stop);
        let took = began.elapsed();
        for share in self.members.iter_mut().filter(|member| member.caller.is_some()) {
            share.work.add_time(took.mul_f64(share.share));
        }
        match result {
            _ if backend.failure().is_some() => {
                self.refuse_all(&super::device_failed());
                MergedStep::Done { unheard: self.unheard }
            }
            Ok(None) => {
                self.let_go();
                MergedStep::Paused(self)
            }
            Ok(Some(attended)) => self.answer_all(&attended),
            Err(BackendError::Stopped(reason)) => {
                self.refuse_all(&BackendError::Stopped(reason).into());
                MergedStep::Done { unheard: self.unheard }
            }
            Err(_) => self.take_apart(),
        }
    }

    /// Lets those go whose caller has left or whose deadline has passed.
    fn let_go(&mut self) {
        let now = Instant::now();
        for member in &mut self.members {
            let gone = member.entry.cancelled.load(Ordering::Acquire);
            let late = member.entry.deadline.is_some_and(|deadline| deadline <= now);
            if !gone && !late {
                continue;
            }
            let Some(caller) = member.caller.take() else { continue };
            self.task.drop_queries(member.queries.clone());
            let error = BackendError::Stopped(StopReason::DeadlinePassed);
            if gone || !caller.tell_reply(Err(error.into())) {
                self.unheard += 1;
            }
        }
    }

    /// Answers each its own rows.
    fn answer_all(mut self, attended: &Attended) -> MergedStep {
        let tokens = self.task.plan.query_tokens().max(1);
        let [out_bytes, lse_count] = [attended.out.len() / tokens, attended.lse.len() / tokens];
        let mut saved_passes = attended.saved_passes;
        for mut member in std::mem::take(&mut self.members) {
            let Some(caller) = member.caller.take() else { continue };
            let MergedMember { mut work, tokens, .. } = member;
            let own = Attended {
                out: attended.out[tokens.start * out_bytes..tokens.end * out_bytes].to_vec(),
                lse: attended.lse[tokens.start * lse_count..tokens.end * lse_count].to_vec(),
                stored_bytes_read: work.stored_bytes(),
                // Of the pass: counted once.
                saved_passes: std::mem::take(&mut saved_passes),
            };
            let reply = work.take_reply(own);
            // What it holds is free before its caller asks for more.
            drop(work);
            self.unheard += u64::from(!caller.tell_reply(Ok(reply)));
        }
        MergedStep::Done { unheard: self.unheard }
    }

    /// The members that wait, as jobs that go alone.
    fn take_apart(self) -> MergedStep {
        let apart = |member: MergedMember| {
            let MergedMember { ticket, entry, work, caller, .. } = member;
            let asked = Box::new(AskedWork { work, caller: caller? });
            let job = QueuedWork::One(DeviceJob::Attend(asked));
            let (entry, ()) = entry.swap_work(job);
            // Never nothing: a cost tells jobs that have begun.
            let cost = Duration::from_nanos(1);
            Some(WaitingJob { ticket, job: QueuedJob { alone: true, cost, ..entry } })
        };
        let jobs = self.members.into_iter().filter_map(apart).collect();
        MergedStep::Apart { jobs, unheard: self.unheard }
    }

    /// Answers all that wait with an error.
    pub(super) fn refuse_all(&mut self, error: &ServiceError) {
        for caller in self.members.iter_mut().filter_map(|member| member.caller.take()) {
            self.unheard += u64::from(!caller.tell_reply(Err(error.clone())));
        }
    }
}

/// An owner's part of a pass.
pub(super) struct TimeShare {
    pub(super) ticket: JobTicket,
    pub(super) part: f64,
}
