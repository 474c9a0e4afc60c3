//! Handles by number. The number of one that was given back is given again, so that what comes and
//! goes for as long as the daemon runs takes no more room than what is there at once.

/// Handles that are held.
pub(super) struct HandleSlots<T> {
    held: Vec<Option<T>>,
    free: Vec<u32>,
}

impl<T> Default for HandleSlots<T> {
    fn default() -> Self {
        Self { held: Vec::new(), free: Vec::new() }
    }
}

impl<T> HandleSlots<T> {
    pub(super) fn insert_handle(&mut self, handle: T) -> u32 {
        if let Some(number) = self.free.pop() {
            self.held[number as usize] = Some(handle);
            return number;
        }
        self.held.push(Some(handle));
        self.held.len() as u32 - 1
    }

    pub(super) fn get(&self, number: u32) -> Option<&T> {
        self.held.get(number as usize)?.as_ref()
    }

    /// Takes one out; `None` when it is not there any more.
    pub(super) fn remove_handle(&mut self, number: u32) -> Option<T> {
        let handle = self.held.get_mut(number as usize)?.take()?;
        self.free.push(number);
        Some(handle)
    }

    /// Takes all out.
    pub(super) fn take_all(&mut self) -> impl Iterator<Item = T> {
        self.free.clear();
        std::mem::take(&mut self.held).into_iter().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::HandleSlots;

    #[test]
    fn numbers_of_what_was_given_back_are_given_again_and_each_once() {
        let mut slots = HandleSlots::default();
        assert_eq!([slots.insert_handle('a'), slots.insert_handle('b')], [0, 1]);
        for _ in 0..1000 {
            assert_eq!(slots.remove_handle(0), Some('a'));
            assert_eq!((slots.remove_handle(0), slots.get(0)), (None, None));
            assert_eq!([slots.insert_handle('a'), slots.insert_handle('c')], [0, 2]);
            assert_eq!((slots.remove_handle(2), slots.get(1)), (Some('c'), Some(&'b')));
        }
        assert_eq!(slots.take_all().collect::<Vec<_>>(), ['a', 'b']);
        assert_eq!(slots.get(1), None);
        assert_eq!(slots.insert_handle('d'), 0);
    }
}
