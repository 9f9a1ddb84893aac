//! The program behind a call that waits.

use std::time::Duration;

/// The program behind a call that waits. A closure is one whose place is not known.
pub trait Caller {
    /// Called about ten times a second while the call waits; `true` asks it to give up.
    fn interrupts(&mut self) -> bool;

    /// Where in the program the call is, such as `train.py:31`; not called before the call has
    /// waited for a while.
    fn place(&mut self) -> Option<String> {
        None
    }
}

impl<F: FnMut() -> bool> Caller for F {
    fn interrupts(&mut self) -> bool {
        self()
    }
}

/// The caller, who may give up.
pub type Interrupt<'a> = &'a mut dyn Caller;

/// How long a wait may last before its `Interrupt` is asked again.
pub const INTERRUPT_INTERVAL: Duration = Duration::from_millis(100);
