use std::collections::BTreeMap;
use std::fmt;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::sleep;

use crate::Moment;
use crate::kept::Kept;
use crate::validity::LONGEST_SLEEP;

/// Keeps the holds of one [`Locks`](crate::Locks) on one runtime alive; the only place that does.
///
/// 1. Every hold has a place in one schedule, ordered by when it has to be looked at: for a renewal
///    after a third of its term, else to notice its end. Times are rounded down to a grid of a
///    hundredth of the ttl, so that the renewals of many holds travel together.
/// 2. One task, the driver, sleeps until the first of them is due and [attends](Kept::attend) to it.
///    A renewal gets a task of its own, only while it runs.
/// 3. Time is that of [`Moment`], which counts suspended time; so no sleep is longer than a second.
///
/// Each runtime has its own keeper: one for all would let every lock die with the first runtime.
pub(crate) struct Keeper {
    runtime: Handle,
    epoch: Moment,
    schedule: Mutex<Schedule>,
    wake: Notify,
    dead: AtomicBool,
}

/// Where a hold stands in the schedule: when it is due since the epoch, and a number that makes the
/// place its own.
pub(crate) type Place = (Duration, u64);

#[derive(Default)]
struct Schedule {
    due: BTreeMap<Place, Arc<Kept>>,
    next_number: u64,
    /// When the driver will look by itself.
    next_look: Duration,
    /// Nobody will place anything new.
    closing: bool,
}

impl Keeper {
    /// A keeper whose driver runs on `runtime`.
    pub(crate) fn start(runtime: Handle) -> Arc<Self> {
        let keeper = Arc::new(Self {
            runtime,
            epoch: Moment::now(),
            schedule: Mutex::default(),
            wake: Notify::new(),
            dead: AtomicBool::new(false),
        });
        let driver = DeadWithIt(keeper.clone());
        drop(keeper.runtime.spawn(async move {
            let driver = driver;
            driver.0.drive().await;
        }));
        keeper
    }

    /// The runtime that this keeper works on.
    pub(crate) fn runtime(&self) -> &Handle {
        &self.runtime
    }

    /// Whether the runtime has ended: nothing is renewed here any more.
    pub(crate) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }

    /// Gives `kept` a new place, so long after that moment; with `None` a place that is never due.
    pub(crate) fn place(
        &self,
        kept: &Arc<Kept>,
        place: &mut Option<Place>,
        due: Option<(Moment, Duration)>,
    ) {
        let due = due.map_or(Duration::MAX, |(now, after)| {
            on_grid(now.since(self.epoch), after, kept.grid())
        });
        let mut schedule = self.schedule();
        if let Some(old) = place.take() {
            let _kept = schedule.due.remove(&old);
        }
        schedule.next_number += 1;
        let new = (due, schedule.next_number);
        schedule.due.insert(new, kept.clone());
        *place = Some(new);
        let sooner = due < schedule.next_look;
        if sooner {
            schedule.next_look = due;
        }
        drop(schedule);
        if sooner {
            self.wake.notify_one();
        }
    }

    /// Takes it off the schedule.
    pub(crate) fn forget(&self, place: &mut Option<Place>) {
        if let Some(old) = place.take() {
            let kept = self.schedule().due.remove(&old);
            drop(kept);
        }
    }

    /// Runs a renewal.
    pub(crate) fn spawn(&self, renewal: impl Future<Output = ()> + Send + 'static) {
        drop(self.runtime.spawn(renewal));
    }

    /// Everything that is not over yet.
    pub(crate) fn all(&self) -> Vec<Arc<Kept>> {
        self.schedule().due.values().cloned().collect()
    }

    /// The driver ends once the schedule is empty.
    pub(crate) fn close(&self) {
        self.schedule().closing = true;
        self.wake.notify_one();
    }

    async fn drive(&self) {
        loop {
            let now = self.epoch.elapsed();
            let (due, next) = {
                let mut schedule = self.schedule();
                let later = schedule.due.split_off(&(now, u64::MAX));
                let due = std::mem::replace(&mut schedule.due, later);
                let next = schedule
                    .due
                    .first_key_value()
                    .map_or(Duration::MAX, |(place, _)| place.0);
                if schedule.closing && schedule.due.is_empty() && due.is_empty() {
                    return;
                }
                schedule.next_look = next;
                (due, next)
            };
            let mut woken = pin!(self.wake.notified());
            if !due.is_empty() {
                for kept in due.into_values() {
                    kept.attend();
                }
                continue;
            }
            if next == Duration::MAX {
                woken.await;
            } else {
                tokio::select! {
                    () = woken.as_mut() => {}
                    () = sleep((next - now).min(LONGEST_SLEEP)) => {}
                }
            }
        }
    }

    fn schedule(&self) -> MutexGuard<'_, Schedule> {
        self.schedule.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Keeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keeper")
            .field("runtime", &self.runtime.id())
            .field("holds", &self.schedule().due.len())
            .finish_non_exhaustive()
    }
}

/// Dropped with the driver, thus at the latest with the runtime.
struct DeadWithIt(Arc<Keeper>);

impl Drop for DeadWithIt {
    fn drop(&mut self) {
        self.0.dead.store(true, Ordering::Release);
    }
}

/// `after` from `now`, rounded down to the grid unless that is past.
fn on_grid(now: Duration, after: Duration, grid: Duration) -> Duration {
    let exact = now.saturating_add(after);
    let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    let (grid, wanted) = (nanos(grid).max(1), nanos(exact));
    let rounded = Duration::from_nanos(wanted - wanted % grid);
    if rounded > now { rounded } else { exact }
}
