//! Draws a token from the softmax of logits. A cube takes a row.
//!
//! ```text
//! largest logit
//! top-k: the largest key that k logits reach        (keys are bits of logits that order like them)
//! top-p: the largest key whose logits weigh p of all
//! weights = exp((logit - largest) / temperature) of the logits that reach both keys
//! every unit adds the weights of its logits; the first sum beyond uniform x total has the token
//! ```
//!
//! A key is found digit by digit, four bits at a time: every unit adds its logits by their next
//! digit, and the digits are summed from the largest down.
//!
//! With top-k few logits matter. The k-th largest of the units' largest logits is a floor: at least
//! k logits reach it. If no unit has more than a few vectors with such a logit, only these are read
//! again. The bits are the same, since all others weigh 0.

use burn_fp4_search::host::{SampleOptions, View};
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::{bf16, f16};

use super::row::{TOGETHER, max_of_cube, sum_of_cube, widest_vector};
use crate::memory::check_memory;
use crate::plan::{Capability, Dtype, Refusal};

/// Most units of a cube: rows are long, and few.
const MAX_UNITS: u32 = 512;

/// Most vectors that a unit keeps.
const MAX_KEPT: u32 = 4;

/// Draws a token for each row of logits `[rows, vocab_size]`, given uniform values f32 `[rows]` in
/// `[0, 1)`: i32 `[rows]`. Equal uniform values draw equal tokens on one device.
///
/// ```
/// # #[cfg(feature = "cpu")] {
/// use burn_fp4_cubecl::cubecl::Device;
/// use burn_fp4_cubecl::cubecl::prelude::CubeElement;
/// use burn_fp4_cubecl::{Capability, Dtype, sample};
/// use burn_fp4_search::host::SampleOptions;
///
/// let client = Device::default().client();
/// let device = Capability::of(&client);
/// let upload = |values: &[f32]| client.create_from_slice(f32::as_bytes(values));
/// // Two rows of two logits, all equally likely.
/// let (logits, uniform) = (upload(&[2.0; 4]), upload(&[0.25, 0.75]));
/// let options = SampleOptions { temperature: 1.0, top_k: None, top_p: None };
/// let tokens = sample(&client, &device, logits, uniform, [2, 2], Dtype::F32, options)?;
/// assert_eq!(i32::from_bytes(&client.read_one_unchecked(tokens)), [0, 1]);
/// # }
/// # Ok::<(), burn_fp4_cubecl::Refusal>(())
/// ```
///
/// # Errors
/// [`Refusal`]; nothing is launched then.
pub fn sample(
    client: &Client,
    device: &Capability,
    logits: Handle,
    uniform: Handle,
    [rows, vocab_size]: [usize; 2],
    dtype: Dtype,
    options: SampleOptions,
) -> Result<Handle, Refusal> {
    device.check_decoder(dtype)?;
    check_memory("logits", &logits, rows * vocab_size * dtype.size())?;
    check_memory("uniform values", &uniform, 4 * rows)?;
    if vocab_size == 0 {
        return Err(Refusal::Mismatch { what: "logits of a row", expected: 1, found: 0 });
    }
    let (found, expected) = (rows.saturating_mul(vocab_size), View::MAX_LEN);
    if found > expected {
        return Err(Refusal::TooLarge { found, expected });
    }
    let tokens = client.empty(4 * rows);
    if rows > 0 {
        let launch = match dtype {
            Dtype::F32 => launch::<f32>,
            Dtype::F16 => launch::<f16>,
            Dtype::Bf16 => launch::<bf16>,
        };
        let handles = [logits, uniform, tokens.clone()];
        launch(client, device, handles, [rows, vocab_size], dtype, options);
    }
    Ok(tokens)
}

/// Facts that a kernel is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Plan {
    units: u32,
    plane: u32,
    /// Logits of a vector.
    vector: u32,
    /// Digits of a key that differ between logits of the dtype.
    digits: u32,
    top_k: bool,
    top_p: bool,
}

fn launch<F: Float>(
    client: &Client,
    device: &Capability,
    [logits, uniform, tokens]: [Handle; 3],
    [rows, vocab_size]: [usize; 2],
    dtype: Dtype,
    SampleOptions { temperature, top_k, top_p }: SampleOptions,
) {
    let vector = widest_vector(vocab_size, dtype);
    let (vectors, len) = ((vocab_size / vector) as u32, rows * vocab_size / vector);
    // A unit has 16 sums, its kept vectors, and a value of each of three reductions over the cube;
    // one more is for padding.
    let most = (device.shared_memory() / 4) as u32 / (20 + MAX_KEPT);
    let plan = Plan {
        units: device.units_of_row(MAX_UNITS.min(1 << most.max(1).ilog2())),
        plane: device.plane,
        vector: vector as u32,
        // Sign, exponent and significand of the f32 of a logit.
        digits: match dtype {
            Dtype::F32 => 8,
            Dtype::F16 => 5,
            Dtype::Bf16 => 4,
        },
        top_k: top_k.is_some_and(|top_k| top_k < vocab_size),
        top_p: top_p.is_some_and(|top_p| top_p < 1.0),
    };
    let [x, y] = device.two_dimensions(rows as u32);
    // SAFETY: the lengths match the shape.
    unsafe {
        sample_kernel::launch_unchecked::<F>(
            client,
            CubeCount::Static(x, y, 1),
            CubeDim::new_1d(plan.units),
            vector,
            BufferArg::from_raw_parts(logits, len),
            BufferArg::from_raw_parts(uniform, rows),
            BufferArg::from_raw_parts(tokens, rows),
            rows as u32,
            vectors,
            1.0 / temperature,
            top_k.unwrap_or(0).max(1) as f32,
            top_p.unwrap_or(1.0),
            plan,
        );
    }
}

/// Returns bits that order like the values, without NaN.
#[cube]
pub(super) fn key(value: f32) -> u32 {
    let bits = u32::reinterpret(value);
    let sign = 0x8000_0000u32;
    select(bits >= sign, !bits, bits | sign)
}

/// Returns a logit; NaN counts as the least.
#[cube]
fn logit_of<F: Float, N: Size>(loaded: Vector<F, N>, #[comptime] index: usize) -> f32 {
    let value = f32::cast_from(loaded.extract(index));
    let magnitude = u32::reinterpret(value) & 0x7FFF_FFFFu32;
    select(magnitude > 0x7F80_0000u32, f32::min_value(), value)
}

/// Returns what a logit adds to a sum: 1, or its weight; 0 if it is below a key.
#[cube]
fn mass(
    logit: f32,
    least: u32,
    largest: f32,
    inverse_temperature: f32,
    #[comptime] counts: bool,
) -> f32 {
    let weight = if comptime!(counts) {
        1.0f32.runtime()
    } else {
        // The largest weighs 1, also if it is infinite.
        let weight = ((logit - largest) * inverse_temperature).exp();
        select(logit == largest, 1.0f32.runtime(), weight)
    };
    select(key(logit) >= least, weight, 0.0f32.runtime())
}

/// The vectors of a row that a unit reads.
#[derive(CubeType, Clone, Copy)]
struct Visits {
    count: u32,
    /// True for those on the unit's list; otherwise they are every `units`-th of the row.
    kept: bool,
}

/// Loads [`TOGETHER`] of the vectors that a unit reads, from number `at` on. Those beyond the last
/// repeat it.
#[cube]
fn load_visits<F: Float, N: Size>(
    logits: &[Vector<F, N>],
    list: &Shared<[u32]>,
    first: u32,
    visits: &Visits,
    at: u32,
    #[comptime] plan: Plan,
) -> Array<Vector<F, N>> {
    let mut loaded = Array::<Vector<F, N>>::new(comptime!(TOGETHER as usize));
    #[unroll]
    for turn in 0..TOGETHER {
        let own = place_in_row(list, visits, min(at + turn, visits.count - 1), plan);
        loaded[turn as usize] = logits[(first + own) as usize];
    }
    loaded
}

/// Returns the place in its row of a vector that a unit reads.
#[cube]
#[allow(clippy::collapsible_if, reason = "the outer condition is one of the compilation")]
fn place_in_row(list: &Shared<[u32]>, visits: &Visits, number: u32, #[comptime] plan: Plan) -> u32 {
    let mut place = number * plan.units + UNIT_POS;
    if comptime!(plan.top_k) {
        if visits.kept {
            place = list[place as usize];
        }
    }
    place
}

/// Keeps the vectors of a unit with a logit that reaches the floor, given the unit's largest logit.
/// Keeps all if any unit has more than [`MAX_KEPT`], or there is no floor.
#[cube]
#[allow(clippy::too_many_arguments)]
fn keep<F: Float, N: Size>(
    logits: &[Vector<F, N>],
    list: &mut Shared<[u32]>,
    sums: &mut Shared<[f32]>,
    first: u32,
    visits: &mut Visits,
    largest: f32,
    top_k: f32,
    #[comptime] plan: Plan,
) {
    let Plan { units, plane, vector, .. } = comptime!(plan);
    let mut of_row = Shared::<[f32]>::new_slice(1usize);
    if UNIT_POS == 0 {
        of_row[0] = f32::min_value();
    }
    sums[UNIT_POS as usize] = largest;
    sync_cube();
    let mut before = 0.0f32.runtime();
    for unit in 0..units {
        let other = sums[unit as usize];
        if other > largest || (other == largest && unit < UNIT_POS) {
            before += 1.0f32;
        }
    }
    if before + 1.0f32 == top_k {
        of_row[0] = largest;
    }
    sync_cube();
    let floor = of_row[0];
    let mut count = 0u32.runtime();
    let mut at = 0u32.runtime();
    while at < visits.count {
        let loaded = load_visits::<F, N>(logits, &*list, first, &*visits, at, plan);
        #[unroll]
        for turn in 0..TOGETHER {
            let mut reaches = false.runtime();
            #[unroll]
            for index in 0..comptime!(vector as usize) {
                // NaN does not.
                let logit = f32::cast_from(loaded[turn as usize].extract(index));
                reaches = reaches || logit >= floor;
            }
            if reaches && at + turn < visits.count {
                if count < MAX_KEPT {
                    let number = at + turn;
                    list[(count * units + UNIT_POS) as usize] = number * units + UNIT_POS;
                }
                count += 1u32;
            }
        }
        at += TOGETHER;
    }
    let most = max_of_cube::<u32>(count, plane, units);
    // Without a floor not even k units have a number.
    let kept = most <= MAX_KEPT && floor > f32::min_value();
    visits.count = select(kept, count, visits.count);
    visits.kept = kept;
}

/// Returns the largest key such that the logits which reach it have a mass of at least `needed`.
/// Logits below `least` have none.
#[cube]
#[allow(clippy::too_many_arguments)]
fn largest_key<F: Float, N: Size>(
    logits: &[Vector<F, N>],
    sums: &mut Shared<[f32]>,
    list: &Shared<[u32]>,
    first: u32,
    visits: &Visits,
    needed: f32,
    least: u32,
    largest: f32,
    inverse_temperature: f32,
    #[comptime] counts: bool,
    #[comptime] plan: Plan,
) -> u32 {
    let Plan { units, plane, vector, digits, .. } = comptime!(plan);
    let mut of_digits = Shared::<[f32]>::new_slice(16usize);
    // One of padding puts the sums of a digit in different banks.
    let stride = comptime!(units + 1);
    let mut prefix = 0u32.runtime();
    let mut needed = needed;
    #[unroll]
    for pass in 0..digits {
        let shift = comptime!(28 - 4 * pass);
        #[unroll]
        for digit in 0..16u32 {
            sums[(comptime!(digit * stride) + UNIT_POS) as usize] = 0.0f32.runtime();
        }
        let mut at = 0u32.runtime();
        while at < visits.count {
            let loaded = load_visits::<F, N>(logits, list, first, visits, at, plan);
            #[unroll]
            for turn in 0..TOGETHER {
                if at + turn < visits.count {
                    #[unroll]
                    for index in 0..comptime!(vector as usize) {
                        let logit = logit_of::<F, N>(loaded[turn as usize], index);
                        let digits = key(logit) >> shift;
                        if digits >> 4u32 == prefix {
                            let to = ((digits & 15u32) * stride + UNIT_POS) as usize;
                            sums[to] += mass(logit, least, largest, inverse_temperature, counts);
                        }
                    }
                }
            }
            at += TOGETHER;
        }
        if comptime!(units > 1) {
            sync_cube();
        }
        // A plane per digit adds the sums of all units: those of a lane in order, then the lanes.
        let planes = comptime!(units / plane);
        #[unroll]
        for turn in 0..comptime!(16u32.div_ceil(planes)) {
            let digit = min(UNIT_POS / plane + comptime!(turn * planes), 15u32);
            let mut sum = 0.0f32.runtime();
            let lane = UNIT_POS % plane;
            for group in 0..planes {
                sum += sums[(digit * stride + group * plane + lane) as usize];
            }
            if comptime!(plane > 1) {
                sum = plane_sum(sum);
            }
            if lane == 0 {
                of_digits[digit as usize] = sum;
            }
        }
        if comptime!(units > 1) {
            sync_cube();
        }
        let mut found = 0u32.runtime();
        let mut done = false.runtime();
        let mut above = 0.0f32.runtime();
        #[unroll]
        for down in 0..16u32 {
            let digit = comptime!(15 - down);
            let sum = of_digits[comptime!(digit as usize)];
            if !done {
                if above + sum >= needed {
                    found = digit.runtime();
                    done = true.runtime();
                } else {
                    above += sum;
                }
            }
        }
        // Without enough mass, which only rounding can cause, all logits reach digit 0.
        needed = select(done, needed - above, f32::max_value());
        prefix = (prefix << 4u32) | found;
    }
    prefix << comptime!(32 - 4 * digits)
}

/// Returns the largest of a unit's own logits.
#[cube]
fn largest_of_unit<F: Float, N: Size>(
    logits: &[Vector<F, N>],
    list: &Shared<[u32]>,
    first: u32,
    visits: &Visits,
    #[comptime] plan: Plan,
) -> f32 {
    let vector = comptime!(plan.vector);
    let mut largest = f32::min_value();
    let mut at = 0u32.runtime();
    while at < visits.count {
        let loaded = load_visits::<F, N>(logits, list, first, visits, at, plan);
        #[unroll]
        for turn in 0..TOGETHER {
            #[unroll]
            for index in 0..comptime!(vector as usize) {
                largest = max(largest, logit_of::<F, N>(loaded[turn as usize], index));
            }
        }
        at += TOGETHER;
    }
    largest
}

/// Runs the steps at the head of this file.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn sample_kernel<F: Float, N: Size>(
    logits: &[Vector<F, N>],
    uniform: &[f32],
    tokens: &mut [i32],
    rows: u32,
    vectors: u32,
    inverse_temperature: f32,
    top_k: f32,
    top_p: f32,
    #[comptime] plan: Plan,
) {
    let Plan { units, plane, vector, .. } = comptime!(plan);
    let row = CUBE_POS as u32;
    if row >= rows {
        terminate!();
    }
    let first = row * vectors;
    let mut sums = Shared::<[f32]>::new_slice(comptime!((16 * (units + 1)) as usize));

    let count = (vectors + comptime!(units - 1) - UNIT_POS) / units;
    let mut visits = Visits { count, kept: false.runtime() };
    let list_len = comptime!(if plan.top_k { MAX_KEPT * units } else { 1 });
    let mut list = Shared::<[u32]>::new_slice(comptime!(list_len as usize));
    let own = largest_of_unit::<F, N>(logits, &list, first, &visits, plan);
    let largest = max_of_cube::<f32>(own, plane, units);
    let mut least = 0u32.runtime();
    if comptime!(plan.top_k) {
        if comptime!(units > 1) {
            keep::<F, N>(logits, &mut list, &mut sums, first, &mut visits, own, top_k, plan);
        }
        least = largest_key::<F, N>(
            logits,
            &mut sums,
            &list,
            first,
            &visits,
            top_k,
            least,
            largest,
            inverse_temperature,
            true,
            plan,
        );
    }
    if comptime!(plan.top_p) {
        let own =
            weigh::<F, N>(logits, &list, first, &visits, least, largest, inverse_temperature, plan);
        let needed = max(sum_of_cube(own, plane, units) * top_p, f32::MIN_POSITIVE);
        least = largest_key::<F, N>(
            logits,
            &mut sums,
            &list,
            first,
            &visits,
            needed,
            least,
            largest,
            inverse_temperature,
            false,
            plan,
        );
    }

    let own =
        weigh::<F, N>(logits, &list, first, &visits, least, largest, inverse_temperature, plan);
    sums[UNIT_POS as usize] = own;
    if comptime!(units > 1) {
        sync_cube();
    }
    let mut total = 0.0f32.runtime();
    let mut before = 0.0f32.runtime();
    // Rounding may put the product at the total: then the last unit with a weight draws.
    let mut last = 0u32.runtime();
    for unit in 0..units {
        if unit == UNIT_POS {
            before = total;
        }
        let sum = sums[unit as usize];
        total += sum;
        if sum > 0.0f32 {
            last = unit;
        }
    }
    let target = max(uniform[row as usize] * total, 0.0f32);
    let mine = before <= target && target < before + own;
    let within = target < total;
    if mine || (!within && last == UNIT_POS) {
        let mut sum = 0.0f32.runtime();
        let mut token = 0u32.runtime();
        let mut done = false.runtime();
        for number in 0..visits.count {
            let at = place_in_row(&list, &visits, number, plan);
            let loaded = logits[(first + at) as usize];
            #[unroll]
            for index in 0..comptime!(vector as usize) {
                let logit = logit_of::<F, N>(loaded, index);
                let weight = mass(logit, least, largest, inverse_temperature, false);
                if !done && weight > 0.0f32 {
                    sum += weight;
                    token = at * vector + comptime!(index as u32);
                    done = before + sum > target;
                }
            }
        }
        tokens[row as usize] = i32::cast_from(token);
    }
}

/// Adds the weights of this unit's logits.
#[cube]
#[allow(clippy::too_many_arguments)]
fn weigh<F: Float, N: Size>(
    logits: &[Vector<F, N>],
    list: &Shared<[u32]>,
    first: u32,
    visits: &Visits,
    least: u32,
    largest: f32,
    inverse_temperature: f32,
    #[comptime] plan: Plan,
) -> f32 {
    let vector = comptime!(plan.vector);
    let mut sum = 0.0f32.runtime();
    let mut at = 0u32.runtime();
    while at < visits.count {
        let loaded = load_visits::<F, N>(logits, list, first, visits, at, plan);
        #[unroll]
        for turn in 0..TOGETHER {
            if at + turn < visits.count {
                #[unroll]
                for index in 0..comptime!(vector as usize) {
                    let logit = logit_of::<F, N>(loaded[turn as usize], index);
                    sum += mass(logit, least, largest, inverse_temperature, false);
                }
            }
        }
        at += TOGETHER;
    }
    sum
}
