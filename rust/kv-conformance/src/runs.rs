//! Runs of random operations; a failing one is made short.

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::manager::BlockManager;
use crate::operation::{Operation, Random};
use crate::world::{Report, World};

/// How much is tried.
#[derive(Clone, Copy, Debug)]
pub struct Runs {
    /// The same seed gives the same operations.
    pub seed: u64,
    /// Pools, each with its own size.
    pub pools: u32,
    /// Operations on each.
    pub operations: usize,
}

impl Default for Runs {
    fn default() -> Self {
        Self {
            seed: 1,
            pools: 200,
            operations: 300,
        }
    }
}

/// A difference, with the operations that lead to it.
#[derive(Clone, Debug)]
pub struct Failure {
    /// Blocks of the pool.
    pub num_blocks: usize,
    /// Tokens of a block.
    pub block_size: usize,
    /// The operations; none of them can be left out.
    pub operations: Vec<Operation>,
    /// The observation after the last one.
    pub difference: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} (a pool of {} blocks of {} tokens), after",
            self.difference, self.num_blocks, self.block_size
        )?;
        for operation in &self.operations {
            writeln!(f, "  {operation:?}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Failure {}

/// Drives a block manager through random operations. `new` makes one with that many blocks of that many tokens, all free.
///
/// # Errors
/// The first difference between what it does and what it must.
pub fn check<M: BlockManager>(
    runs: &Runs,
    new: impl Fn(usize, usize) -> M,
) -> Result<Report, Failure> {
    let mut random = Random(runs.seed);
    let mut report = Report::default();
    for _ in 0..runs.pools {
        let num_blocks = 2 + random.below(30) as usize;
        let block_size = 1 + random.below(4) as usize;
        let operations: Vec<_> = (0..runs.operations).map(|_| random.operation()).collect();
        let run = |operations: &[Operation], report: &mut Report| {
            let world = || World::new(new(num_blocks, block_size), num_blocks, block_size);
            run(world, operations, report)
        };
        if let Err((end, difference)) = run(&operations, &mut report) {
            let (operations, difference) =
                shorten(operations[..end].to_vec(), difference, |operations| {
                    run(operations, &mut Report::default()).err()
                });
            return Err(Failure {
                num_blocks,
                block_size,
                operations,
                difference,
            });
        }
    }
    Ok(report)
}

/// Runs operations on a new pool, and frees all sequences at the end; the error has the number of operations done.
fn run<M: BlockManager>(
    world: impl FnOnce() -> World<M>,
    operations: &[Operation],
    report: &mut Report,
) -> Result<(), (usize, String)> {
    let mut done = 0;
    let all = AssertUnwindSafe(|| {
        let mut world = world();
        for operation in operations {
            done += 1;
            world.apply(*operation, report)?;
        }
        world.end(report)
    });
    let outcome = catch_unwind(all).unwrap_or_else(|panic| Err(message(&*panic)));
    outcome.map_err(|difference| (done, difference))
}

fn message(panic: &dyn Any) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    format!("it panics: {}", text.unwrap_or("without a message"))
}

/// Leaves out operations, many at once and then one by one, as long as there is a difference.
fn shorten(
    mut operations: Vec<Operation>,
    mut difference: String,
    fails: impl Fn(&[Operation]) -> Option<(usize, String)>,
) -> (Vec<Operation>, String) {
    let mut size = operations.len().div_ceil(2);
    loop {
        let before = operations.len();
        let mut end = operations.len();
        while end > 0 {
            let start = end.saturating_sub(size);
            let mut fewer = [&operations[..start], &operations[end..]].concat();
            if let Some((len, shorter)) = fails(&fewer) {
                fewer.truncate(len);
                (operations, difference) = (fewer, shorter);
            }
            end = start.min(operations.len());
        }
        if size <= 1 && operations.len() == before {
            return (operations, difference);
        }
        size = size.div_ceil(2);
    }
}
