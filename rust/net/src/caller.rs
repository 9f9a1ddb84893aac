//! The program that makes a blocking call.

use std::time::Duration;

/// The program that makes a blocking call. A closure implements it without a place.
pub trait Caller {
    /// Called about ten times a second while the call waits; `true` cancels the call.
    fn interrupts(&mut self) -> bool;

    /// Returns the place of the call in the program, such as `train.py:31`. Called only after the
    /// call has waited for a while.
    fn place(&mut self) -> Option<String> {
        None
    }
}

impl<F: FnMut() -> bool> Caller for F {
    fn interrupts(&mut self) -> bool {
        self()
    }
}

/// Reference to the caller of a blocking function, which may cancel it.
pub type Interrupt<'a> = &'a mut dyn Caller;

/// Longest time between two polls of an `Interrupt` during a wait.
pub const INTERRUPT_INTERVAL: Duration = Duration::from_millis(100);
