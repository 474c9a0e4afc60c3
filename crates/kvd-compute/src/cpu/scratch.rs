//! Vectors of one attend whose memory the next one uses again: an attend of one token would take
//! longer to ask for memory than to use it.
//!
//! A backend owns the stores. A thread takes one while it works for that backend; vectors that are
//! dropped there give their memory to it. Without a store they are as any other.

use parking_lot::Mutex;
use std::cell::RefCell;
use std::ops::{Deref, DerefMut};

/// Most bytes that a store keeps: those of some units of attention. Beyond that memory is freed.
const STORE_BYTES_MAX: usize = 1 << 20;
/// Most bytes of one vector that is kept. What takes longer to fill than to ask for is freed.
const VECTOR_BYTES_MAX: usize = 128 << 10;
/// Shelves of a store, each of vectors with room for that power of two of values.
const SHELVES: usize = VECTOR_BYTES_MAX.ilog2() as usize + 1;

/// Vectors of one kind, by the logarithm of their room.
struct VectorShelves<T>([Vec<Vec<T>>; SHELVES]);

impl<T> Default for VectorShelves<T> {
    fn default() -> Self {
        Self(std::array::from_fn(|_| Vec::new()))
    }
}

/// A kind of value that vectors are kept of.
pub(crate) trait ScratchValue: Sized + 'static {
    /// An empty vector with room for so many values at least, from this thread's store if it has
    /// one.
    fn take_vector(room: usize) -> Vec<Self>;

    /// Gives the memory of an empty vector to this thread's store.
    fn keep_vector(vector: Vec<Self>);
}

macro_rules! scratch_values {
    ($($shelf:ident: $value:ty;)*) => {
        /// Memory for the vectors of one thread.
        #[derive(Default)]
        struct ScratchStore {
            /// Bytes of all vectors.
            bytes: usize,
            $($shelf: VectorShelves<$value>,)*
        }

        $(impl ScratchValue for $value {
            fn take_vector(room: usize) -> Vec<Self> {
                let kept = with_store(|store| {
                    let shelf = shelf_with_room(room)?;
                    let vector = store.$shelf.0[shelf].pop()?;
                    store.bytes -= vector_bytes(&vector);
                    Some(vector)
                });
                kept.flatten().unwrap_or_else(|| {
                    // Room for what may come, where it will be kept.
                    let is_kept = room > 0 && room * size_of::<Self>() <= VECTOR_BYTES_MAX;
                    Vec::with_capacity(if is_kept { room.next_power_of_two() } else { room })
                })
            }

            fn keep_vector(vector: Vec<Self>) {
                let bytes = vector_bytes(&vector);
                if vector.capacity() == 0 || bytes > VECTOR_BYTES_MAX {
                    return;
                }
                with_store(|store| {
                    if store.bytes + bytes <= STORE_BYTES_MAX {
                        store.bytes += bytes;
                        store.$shelf.0[vector.capacity().ilog2() as usize].push(vector);
                    }
                });
            }
        })*
    };
}

scratch_values! {
    floats: f32;
    pairs: [f32; 2];
    sums: i32;
    octets: u8;
    numbers: usize;
    ranges: std::ops::Range<usize>;
    states: crate::PartialState;
    losses: crate::cpu::loss::RowLoss;
    rounding_losses: crate::cpu::loss::RoundingLoss;
    rounded_rows: crate::cpu::int_operands::RoundedRow;
    probe_results: crate::cpu::score_probe::ProbeResult;
    groups: crate::cpu::unit_plan::RowGroup;
    units: crate::cpu::unit_plan::UnitPlan;
    answers: Option<crate::cpu::unit_answer::UnitAnswer>;
    written: crate::cpu::attend::WrittenGroup;
    unit_answers: crate::cpu::attend::UnitAnswers;
    repeated: crate::cpu::attend::RepeatedRows;
    wide_states: Vec<crate::cpu::attend_f64::WideState>;
}

/// The shelf whose vectors all have that room.
fn shelf_with_room(room: usize) -> Option<usize> {
    let shelf = room.checked_next_power_of_two().filter(|_| room > 0)?.ilog2() as usize;
    (shelf < SHELVES).then_some(shelf)
}

fn vector_bytes<T>(vector: &Vec<T>) -> usize {
    vector.capacity() * size_of::<T>()
}

thread_local! {
    /// The store of the backend that this thread works for.
    static STORE: RefCell<Option<Box<ScratchStore>>> = const { RefCell::new(None) };
}

/// Looks into this thread's store; nothing where it has none, or none any more.
fn with_store<T>(look: impl FnOnce(&mut ScratchStore) -> T) -> Option<T> {
    let found = STORE.try_with(|store| store.borrow_mut().as_deref_mut().map(look));
    found.ok().flatten()
}

/// Stores of a backend that no thread has at the moment.
pub(crate) struct ScratchStores {
    free: Mutex<Vec<Box<ScratchStore>>>,
    /// Most that are kept.
    most: usize,
}

/// The store of a thread until this is dropped.
pub(crate) struct TakenStore<'a> {
    /// None where the thread had one before.
    stores: Option<&'a ScratchStores>,
}

impl ScratchStores {
    /// Stores for so many threads.
    pub(crate) fn for_threads(threads: usize) -> Self {
        Self { free: Mutex::new(Vec::with_capacity(threads)), most: threads }
    }

    /// Gives this thread a store, unless it has one.
    pub(crate) fn take_store(&self) -> TakenStore<'_> {
        let is_new = STORE.with_borrow_mut(|store| {
            let is_new = store.is_none();
            store.get_or_insert_with(|| self.free.lock().pop().unwrap_or_default());
            is_new
        });
        TakenStore { stores: is_new.then_some(self) }
    }
}

impl Drop for TakenStore<'_> {
    fn drop(&mut self) {
        let Some(stores) = self.stores else { return };
        // Not dropped while it is borrowed: vectors in it would look for it.
        let Some(store) = STORE.with_borrow_mut(Option::take) else { return };
        let mut free = stores.free.lock();
        if free.len() < stores.most {
            free.push(store);
        }
    }
}

/// A vector whose memory is used again.
pub(crate) struct ScratchVec<T: ScratchValue>(Vec<T>);

impl<T: ScratchValue> ScratchVec<T> {
    /// An empty one with room for so many values.
    pub(crate) fn with_room(room: usize) -> Self {
        Self(T::take_vector(room))
    }

    /// So many values, all the same.
    pub(crate) fn repeat_value(value: T, len: usize) -> Self
    where
        T: Clone,
    {
        let mut all = Self::with_room(len);
        all.0.resize(len, value);
        all
    }

    /// The values of an iterator that says how many there are.
    pub(crate) fn collect_values(values: impl ExactSizeIterator<Item = T>) -> Self {
        let mut all = Self::with_room(values.len());
        all.0.extend(values);
        all
    }

    /// Takes the values from `at` on out.
    pub(crate) fn split_from(&mut self, at: usize) -> Self {
        let mut rest = Self::with_room(self.0.len() - at);
        rest.0.extend(self.0.drain(at..));
        rest
    }

    /// Makes it so long, with that value behind what is there.
    pub(crate) fn resize_with_room(&mut self, len: usize, value: T)
    where
        T: Clone,
    {
        self.make_room(len);
        self.0.resize(len, value);
    }

    /// Appends a value.
    #[inline]
    pub(crate) fn push_value(&mut self, value: T) {
        if self.0.len() == self.0.capacity() {
            self.make_room((2 * self.0.len()).max(4));
        }
        self.0.push(value);
    }

    /// Makes room for so many values in all.
    fn make_room(&mut self, room: usize) {
        if room > self.0.capacity() {
            let mut larger = T::take_vector(room);
            larger.append(&mut self.0);
            T::keep_vector(std::mem::replace(&mut self.0, larger));
        }
    }
}

impl<T: ScratchValue> Drop for ScratchVec<T> {
    fn drop(&mut self) {
        let mut vector = std::mem::take(&mut self.0);
        // Values may have vectors of their own.
        vector.clear();
        T::keep_vector(vector);
    }
}

impl<T: ScratchValue> Default for ScratchVec<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T: ScratchValue + Clone> Clone for ScratchVec<T> {
    fn clone(&self) -> Self {
        Self::collect_values(self.0.iter().cloned())
    }
}

impl<T: ScratchValue + std::fmt::Debug> std::fmt::Debug for ScratchVec<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl<T: ScratchValue> Deref for ScratchVec<T> {
    type Target = Vec<T>;

    fn deref(&self) -> &Vec<T> {
        &self.0
    }
}

impl<T: ScratchValue> DerefMut for ScratchVec<T> {
    fn deref_mut(&mut self) -> &mut Vec<T> {
        &mut self.0
    }
}

impl<'a, T: ScratchValue> IntoIterator for &'a ScratchVec<T> {
    type Item = &'a T;
    type IntoIter = std::slice::Iter<'a, T>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter()
    }
}

impl<'a, T: ScratchValue> IntoIterator for &'a mut ScratchVec<T> {
    type Item = &'a mut T;
    type IntoIter = std::slice::IterMut<'a, T>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter_mut()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(vector: &ScratchVec<f32>) -> usize {
        vector.as_ptr().addr()
    }

    #[test]
    fn memory_is_used_again_by_vectors_that_it_has_room_for_and_is_zeroed() {
        let stores = ScratchStores::for_threads(1);
        let first = {
            let _taken = stores.take_store();
            let vector = ScratchVec::repeat_value(7.0, 100);
            let at = address(&vector);
            drop(vector);
            assert_ne!(
                address(&ScratchVec::repeat_value(1.0, 129)),
                at,
                "more than it has room for"
            );
            let again = ScratchVec::repeat_value(0.0, 128);
            assert_eq!((address(&again), &again[..]), (at, &[0.0; 128][..]));
            at
        };
        // The store is the backend's: whoever works next has its memory.
        let _taken = stores.take_store();
        assert_eq!(address(&ScratchVec::repeat_value(0.0, 65)), first);
    }

    #[test]
    fn a_vector_that_grows_keeps_its_values_and_gives_its_memory_back() {
        let stores = ScratchStores::for_threads(1);
        let _taken = stores.take_store();
        let mut vector = ScratchVec::default();
        (0..1000).for_each(|i| vector.push_value(i as f32));
        assert!(vector.iter().enumerate().all(|(at, value)| *value == at as f32));
        let rest = vector.split_from(900);
        assert_eq!((vector.len(), rest.len(), rest[0]), (900, 100, 900.0));
        vector.resize_with_room(5000, -1.0);
        assert_eq!((vector[899], vector[900], vector.len()), (899.0, -1.0, 5000));
        let kept = with_store(|store| store.floats.0.iter().map(Vec::len).sum::<usize>());
        assert!(kept.unwrap() >= 2, "{kept:?}");
    }

    #[test]
    fn a_store_keeps_no_more_than_its_bound_and_nothing_that_is_large() {
        let stores = ScratchStores::for_threads(1);
        let _taken = stores.take_store();
        drop(ScratchVec::repeat_value(0u8, VECTOR_BYTES_MAX + 1));
        assert_eq!(with_store(|store| store.bytes), Some(0));
        let many: Vec<_> =
            (0..100).map(|_| ScratchVec::repeat_value(0u8, VECTOR_BYTES_MAX)).collect();
        drop(many);
        assert_eq!(with_store(|store| store.bytes), Some(STORE_BYTES_MAX));
        let vector = ScratchVec::repeat_value(0u8, VECTOR_BYTES_MAX);
        assert_eq!(with_store(|store| store.bytes), Some(STORE_BYTES_MAX - vector.capacity()));
    }

    #[test]
    fn a_thread_without_a_store_keeps_nothing_and_one_within_another_is_the_same() {
        drop(ScratchVec::repeat_value(0.0, 8));
        assert_eq!(with_store(|store| store.bytes), None);
        let stores = ScratchStores::for_threads(1);
        let outer = stores.take_store();
        drop(stores.take_store());
        assert_eq!(with_store(|_| ()), Some(()), "the inner one does not take it away");
        drop(outer);
        assert_eq!(with_store(|_| ()), None);
        assert_eq!(stores.free.lock().len(), 1);
    }
}
