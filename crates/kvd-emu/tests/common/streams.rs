//! The two streams of a made-up device. CUDA leaves open when work is done that nothing waits for;
//! here a [`Pace`] decides, so that an order that is missing shows. What would be a race on a GPU
//! is a complaint.

use kvd_cuda::{DeviceStream, EventId, PinnedRange};
use std::collections::BTreeMap;
use std::ops::Range;

/// When work is done that nobody waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pace {
    /// Never.
    Late,
    /// Copies to the device at once, where nothing holds them up.
    EagerCopies,
    /// Everything else at once, where nothing holds it up.
    EagerKernels,
}

impl Pace {
    pub(crate) const EACH: [Self; 3] = [Self::Late, Self::EagerCopies, Self::EagerKernels];

    fn eager(self) -> Option<DeviceStream> {
        match self {
            Self::Late => None,
            Self::EagerCopies => Some(DeviceStream::Copy),
            Self::EagerKernels => Some(DeviceStream::Compute),
        }
    }
}

/// A piece of work of a stream.
#[derive(Clone, Debug)]
pub(crate) enum Work {
    Write {
        to: u64,
        from: PinnedRange,
    },
    Read {
        from: u64,
        to: PinnedRange,
    },
    Copy {
        from: u64,
        to: u64,
        bytes: u64,
    },
    Launch {
        kernel: String,
        blocks: u32,
        shared_bytes: u32,
        parameters: Vec<u8>,
    },
    /// Goes on when so much of a stream is done.
    Wait(DeviceStream, usize),
}

impl Work {
    fn pinned(&self) -> Option<PinnedRange> {
        match self {
            Self::Write { from: range, .. } | Self::Read { to: range, .. } => Some(*range),
            _ => None,
        }
    }

    /// Whether it reads or writes some of a range of the device; of a kernel, whether one of its
    /// parameters points there.
    fn uses(&self, range: &Range<u64>) -> bool {
        let meets = |start: u64, bytes: u64| start < range.end && range.start < start + bytes;
        match self {
            Self::Write { to, from } => meets(*to, from.bytes),
            Self::Read { from, to } => meets(*from, to.bytes),
            Self::Copy { from, to, bytes } => meets(*from, *bytes) || meets(*to, *bytes),
            Self::Launch { parameters, .. } => {
                let words = parameters.as_chunks::<8>().0.iter();
                words.map(|word| u64::from_le_bytes(*word)).any(|word| range.contains(&word))
            }
            Self::Wait(..) => false,
        }
    }
}

/// Work and its number among all that was given.
type Given = (Work, u64);

/// Both streams: what they were given, how much is done, and how much of that the host knows.
#[derive(Default)]
pub(crate) struct Streams {
    given: [Vec<Given>; 2],
    done: [usize; 2],
    seen: [usize; 2],
    events: BTreeMap<EventId, Option<(DeviceStream, usize)>>,
    count: u64,
}

impl Streams {
    pub(crate) fn create_event(&mut self) -> EventId {
        let event = EventId(self.events.len() as u32);
        self.events.insert(event, None);
        event
    }

    pub(crate) fn give(&mut self, stream: DeviceStream, work: Work) {
        self.given[stream as usize].push((work, self.count));
        self.count += 1;
    }

    pub(crate) fn record(&mut self, event: EventId, stream: DeviceStream) {
        let at = self.given[stream as usize].len();
        *self.events.get_mut(&event).expect("an event") = Some((stream, at));
    }

    pub(crate) fn wait(&mut self, stream: DeviceStream, event: EventId) {
        if let Some((other, until)) = self.events[&event] {
            self.give(stream, Work::Wait(other, until));
        }
    }

    /// The work that must be done next before an event has happened.
    pub(crate) fn next_before(&mut self, event: EventId) -> Option<Given> {
        let (stream, until) = self.events[&event]?;
        self.next(stream, until, true)
    }

    /// The work that a device of this pace does next of itself.
    pub(crate) fn next_of(&mut self, pace: Pace) -> Option<Given> {
        let stream = pace.eager()?;
        self.next(stream, usize::MAX, false)
    }

    fn next(&mut self, stream: DeviceStream, until: usize, forced: bool) -> Option<Given> {
        let index = stream as usize;
        loop {
            let at = self.done[index];
            let (work, number) = self.given[index].get(at).filter(|_| at < until)?.clone();
            if let Work::Wait(other, until) = work {
                if self.done[other as usize] < until {
                    return if forced { self.next(other, until, true) } else { None };
                }
                self.done[index] += 1;
                continue;
            }
            self.done[index] += 1;
            return Some((work, number));
        }
    }

    /// The host has waited for an event: it knows of all that came before.
    pub(crate) fn see(&mut self, event: EventId) {
        if let Some((stream, until)) = self.events[&event] {
            self.see_until(stream, until);
        }
    }

    fn see_until(&mut self, stream: DeviceStream, until: usize) {
        let seen = self.seen[stream as usize];
        if seen >= until {
            return;
        }
        self.seen[stream as usize] = until;
        let waits = self.given[stream as usize][seen..until].iter();
        let waits = waits.filter_map(|(work, _)| match work {
            Work::Wait(other, until) => Some((*other, *until)),
            _ => None,
        });
        for (other, until) in waits.collect::<Vec<_>>() {
            self.see_until(other, until);
        }
    }

    /// Work that the host does not know to be done.
    fn unseen(&self) -> impl Iterator<Item = &Work> {
        let streams = self.given.iter().zip(self.seen);
        streams.flat_map(|(given, seen)| given[seen..].iter().map(|(work, _)| work))
    }

    /// Whether the host may not touch pinned memory.
    pub(crate) fn holds_pinned(&self, range: PinnedRange) -> bool {
        let meets = |used: PinnedRange| {
            used.memory == range.memory
                && used.start < range.start + range.bytes
                && range.start < used.start + used.bytes
        };
        self.unseen().filter_map(Work::pinned).any(meets)
    }

    /// Whether a launch of these very words may be under way.
    pub(crate) fn holds_launch(&self, launch: &Work) -> bool {
        let Work::Launch { kernel, parameters, .. } = launch else { return false };
        self.unseen().any(|work| match work {
            Work::Launch { kernel: other, parameters: words, .. } => {
                (other, words) == (kernel, parameters)
            }
            _ => false,
        })
    }

    /// Whether memory of the device may not be given back.
    pub(crate) fn holds(&self, range: &Range<u64>) -> bool {
        self.unseen().any(|work| work.uses(range))
    }

    /// The race that doing this work now would be.
    pub(crate) fn complaint(&self, (work, number): &Given) -> Option<String> {
        let undone = |stream: DeviceStream| {
            let rest = self.given[stream as usize][self.done[stream as usize]..].iter();
            rest.filter(|given| given.1 < *number).map(|(work, _)| work)
        };
        if let Work::Write { to, from } = work {
            let range = *to..*to + from.bytes;
            let used = undone(DeviceStream::Compute).find(|work| work.uses(&range))?;
            return Some(format!("a copy overwrites what work before it still uses: {used:?}"));
        }
        let late = undone(DeviceStream::Copy).find(|work| matches!(work, Work::Write { .. }))?;
        Some(format!("a kernel or copy runs before a copy that was asked for first: {late:?}"))
    }
}
