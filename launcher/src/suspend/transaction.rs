//! Suspends or resumes several processes: all of them or none.

use std::time::{Duration, Instant};

use super::driver::{CheckpointDriver, CheckpointError, ProcessState};

/// A step with one process, as progress shows it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Step {
    /// Waits for its work on the GPU.
    Lock,
    /// Copies its GPU memory to the host.
    Save,
    /// Brings its GPU memory back.
    Restore,
    /// Lets it go on.
    Unlock,
}

impl Step {
    /// The description of this step.
    pub(crate) fn text(self) -> &'static str {
        match self {
            Step::Lock => "waiting for the GPU work of",
            Step::Save => "saving",
            Step::Restore => "restoring",
            Step::Unlock => "letting go",
        }
    }
}

/// Why a transaction failed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Failure {
    /// The process and the step that failed. `None` if the user interrupted it.
    pub(crate) cause: Option<(u32, Step, CheckpointError)>,
    /// Processes that could not be brought back into the state they were in, with that step and its error.
    pub(crate) left: Vec<(u32, Step, CheckpointError)>,
}

/// Does the steps. `progress` is called before each one, and returns whether to go on.
struct Transaction<'a> {
    driver: &'a dyn CheckpointDriver,
    /// Until when processes may take to be locked.
    deadline: Instant,
    progress: &'a mut dyn FnMut(Step, u32) -> bool,
}

impl Transaction<'_> {
    /// Does the same step with each process.
    fn each(&mut self, step: Step, pids: &[u32]) -> Result<(), Option<(u32, Step, CheckpointError)>> {
        for pid in pids {
            if !(self.progress)(step, *pid) {
                return Err(None);
            }
            self.step(step, *pid).map_err(|error| Some((*pid, step, error)))?;
        }
        Ok(())
    }

    fn step(&self, step: Step, pid: u32) -> Result<(), CheckpointError> {
        match step {
            Step::Lock => self.driver.lock(pid, self.deadline.saturating_duration_since(Instant::now())),
            Step::Save => self.driver.save(pid),
            Step::Restore => self.driver.restore(pid),
            Step::Unlock => self.driver.unlock(pid),
        }
    }

    /// Undoes steps, the last one first, each process as its state needs it.
    fn undo(&mut self, pids: &[u32], target: ProcessState) -> Vec<(u32, Step, CheckpointError)> {
        self.deadline = Instant::now() + UNDO_TIMEOUT;
        let mut left = Vec::new();
        for pid in pids.iter().rev() {
            while let Ok(state) = self.driver.state(*pid) {
                let step = match (state, target) {
                    (ProcessState::Suspended, ProcessState::Running) => Step::Restore,
                    (ProcessState::Locked, ProcessState::Running) => Step::Unlock,
                    (ProcessState::Running, ProcessState::Suspended) => Step::Lock,
                    (ProcessState::Locked, ProcessState::Suspended) => Step::Save,
                    (ProcessState::Failed, _) => {
                        left.push((*pid, Step::Restore, CheckpointError(CheckpointError::ILLEGAL_STATE)));
                        break;
                    }
                    _ => break,
                };
                if let Err(error) = self.step(step, *pid) {
                    left.push((*pid, step, error));
                    break;
                }
            }
        }
        left
    }
}

/// How long the processes that were resumed may take to be locked again.
const UNDO_TIMEOUT: Duration = Duration::from_secs(10);

/// Suspends the processes, which run. `timeout` limits the wait for their work on the GPU, all of them together. After
/// a failure all run again, but for [`Failure::left`].
pub(crate) fn suspend(
    driver: &dyn CheckpointDriver,
    pids: &[u32],
    timeout: Duration,
    progress: &mut dyn FnMut(Step, u32) -> bool,
) -> Result<(), Failure> {
    let mut transaction = Transaction { driver, deadline: Instant::now() + timeout, progress };
    // All are locked before the first one is saved, so that none waits for memory of another that is gone.
    let done = transaction.each(Step::Lock, pids).and_then(|()| transaction.each(Step::Save, pids));
    done.map_err(|cause| Failure { cause, left: transaction.undo(pids, ProcessState::Running) })
}

/// Resumes the processes that are suspended, and lets those go on that are locked. After a failure all that were
/// suspended are suspended again, but for [`Failure::left`].
pub(crate) fn resume(
    driver: &dyn CheckpointDriver,
    pids: &[u32],
    progress: &mut dyn FnMut(Step, u32) -> bool,
) -> Result<(), Failure> {
    let is = |pid: &u32, target| driver.state(*pid) == Ok(target);
    let suspended: Vec<u32> = pids.iter().copied().filter(|pid| is(pid, ProcessState::Suspended)).collect();
    let locked = pids.iter().copied().filter(|pid| is(pid, ProcessState::Locked));
    let locked: Vec<u32> = suspended.iter().copied().chain(locked).collect();
    let mut transaction = Transaction { driver, deadline: Instant::now(), progress };
    let done = transaction.each(Step::Restore, &suspended).and_then(|()| transaction.each(Step::Unlock, &locked));
    done.map_err(|cause| Failure { cause, left: transaction.undo(&suspended, ProcessState::Suspended) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::collections::BTreeMap;

    /// A driver with processes in these states. `failures` are steps that fail once.
    struct Simulated {
        states: RefCell<BTreeMap<u32, ProcessState>>,
        failures: RefCell<Vec<(u32, Step, i32)>>,
        steps: RefCell<Vec<(Step, u32)>>,
    }

    impl Simulated {
        fn with(states: &[(u32, ProcessState)], failures: &[(u32, Step, i32)]) -> Simulated {
            Simulated {
                states: RefCell::new(states.iter().copied().collect()),
                failures: RefCell::new(failures.to_vec()),
                steps: RefCell::default(),
            }
        }

        fn change(&self, pid: u32, step: Step, from: ProcessState, to: ProcessState) -> Result<(), CheckpointError> {
            self.steps.borrow_mut().push((step, pid));
            let mut failures = self.failures.borrow_mut();
            if let Some(at) = failures.iter().position(|(p, s, _)| (*p, *s) == (pid, step)) {
                return Err(CheckpointError(failures.remove(at).2));
            }
            let mut states = self.states.borrow_mut();
            match states.get_mut(&pid) {
                Some(state) if *state == from => *state = to,
                Some(_) => return Err(CheckpointError(401)),
                None => return Err(CheckpointError(304)),
            }
            Ok(())
        }

        fn all(&self) -> Vec<ProcessState> {
            self.states.borrow().values().copied().collect()
        }
    }

    impl CheckpointDriver for Simulated {
        fn state(&self, pid: u32) -> Result<ProcessState, CheckpointError> {
            self.states.borrow().get(&pid).copied().ok_or(CheckpointError(304))
        }
        fn lock(&self, pid: u32, _: Duration) -> Result<(), CheckpointError> {
            self.change(pid, Step::Lock, Running, Locked)
        }
        fn save(&self, pid: u32) -> Result<(), CheckpointError> {
            self.change(pid, Step::Save, Locked, Suspended)
        }
        fn restore(&self, pid: u32) -> Result<(), CheckpointError> {
            self.change(pid, Step::Restore, Suspended, Locked)
        }
        fn unlock(&self, pid: u32) -> Result<(), CheckpointError> {
            self.change(pid, Step::Unlock, Locked, Running)
        }
    }

    use ProcessState::{Locked, Running, Suspended};
    const LIMIT: Duration = Duration::from_secs(60);

    fn go_on(_: Step, _: u32) -> bool {
        true
    }

    #[test]
    fn all_processes_are_locked_before_the_first_is_saved() {
        let driver = Simulated::with(&[(1, Running), (2, Running)], &[]);
        assert_eq!(suspend(&driver, &[1, 2], LIMIT, &mut go_on), Ok(()));
        assert_eq!(driver.all(), [Suspended, Suspended]);
        let steps = [(Step::Lock, 1), (Step::Lock, 2), (Step::Save, 1), (Step::Save, 2)];
        assert_eq!(driver.steps.take(), steps);
        assert_eq!(resume(&driver, &[1, 2], &mut go_on), Ok(()));
        assert_eq!(driver.all(), [Running, Running]);
        let steps = [(Step::Restore, 1), (Step::Restore, 2), (Step::Unlock, 1), (Step::Unlock, 2)];
        assert_eq!(driver.steps.take(), steps);
    }

    #[test]
    fn after_any_failure_all_processes_run_again() {
        for failed in [(1, Step::Lock, 600), (2, Step::Lock, 600), (1, Step::Save, 801), (2, Step::Save, 801)] {
            let driver = Simulated::with(&[(1, Running), (2, Running)], &[failed]);
            let failure = suspend(&driver, &[1, 2], LIMIT, &mut go_on).unwrap_err();
            assert_eq!(failure.cause, Some((failed.0, failed.1, CheckpointError(failed.2))));
            assert_eq!((failure.left, driver.all()), (vec![], vec![Running, Running]), "{failed:?}");
        }
    }

    #[test]
    fn an_interrupted_suspension_is_undone() {
        for stop_at in 0..4 {
            let driver = Simulated::with(&[(1, Running), (2, Running)], &[]);
            let mut steps = 0;
            let mut progress = |_, _| {
                steps += 1;
                steps <= stop_at
            };
            let failure = suspend(&driver, &[1, 2], LIMIT, &mut progress).unwrap_err();
            assert_eq!((failure.cause, failure.left), (None, vec![]));
            assert_eq!(driver.all(), [Running, Running], "{stop_at}");
        }
    }

    #[test]
    fn what_cannot_be_undone_is_reported() {
        let failures = [(2, Step::Save, 801), (1, Step::Restore, 2)];
        let driver = Simulated::with(&[(1, Running), (2, Running)], &failures);
        let failure = suspend(&driver, &[1, 2], LIMIT, &mut go_on).unwrap_err();
        assert_eq!(failure.left, [(1, Step::Restore, CheckpointError(2))]);
        assert_eq!(driver.all(), [Suspended, Running]);
    }

    #[test]
    fn if_one_process_cannot_be_resumed_all_stay_suspended() {
        let driver = Simulated::with(&[(1, Suspended), (2, Suspended)], &[(2, Step::Restore, 2)]);
        let failure = resume(&driver, &[1, 2], &mut go_on).unwrap_err();
        assert_eq!(failure.cause, Some((2, Step::Restore, CheckpointError(2))));
        assert_eq!((failure.left, driver.all()), (vec![], vec![Suspended, Suspended]));
    }

    #[test]
    fn locked_processes_of_an_interrupted_suspension_go_on() {
        let driver = Simulated::with(&[(1, Locked), (2, Suspended), (3, Running)], &[]);
        assert_eq!(resume(&driver, &[1, 2, 3], &mut go_on), Ok(()));
        assert_eq!(driver.all(), [Running, Running, Running]);
    }
}
