// How a read's tokens are cut into launches, and what each launch of the down projection asks of the card. Pure rules:
// gpu/launch.cu follows them, the tests and `strata_ops info` ask them.
#pragma once

#include <array>
#include <cstddef>

#include "common/fused_gr_policy.hpp"
#include "common/geometry.hpp"

namespace strata {

// The tuned down kernels: a row a group of lanes, eight rows a block, and one more block for the inject rows.
inline constexpr int kDownThreads = 256;
inline constexpr int kDownRows = kDownThreads / kLanes;
inline constexpr int kDownBlocks = static_cast<int>(kModelGeometry.rank) / kDownRows;
inline constexpr int kTile = static_cast<int>(kModelGeometry.width) / 2;  // floats of one token in an activation tile
inline constexpr int kTiles = static_cast<int>(kModelGeometry.depth()) / kTile;
inline constexpr int kTileFloat4s = kTile / 4;
inline constexpr int kTileChunks = kTile / kChunk;
inline constexpr int kTileRounds = kTileChunks / kLanes;  // chunks of a tile that one lane takes

static_assert(kModelGeometry.rank % kDownRows == 0 && kModelGeometry.streams <= kDownRows);
static_assert(kTileChunks % kLanes == 0, "a lane's chunks stay its own across tiles");
static_assert(kDownThreads % 64 == 0, "whole waves on 64-lane cards");

// The up kernel's columns a block: narrow blocks share a q8_1 block in pairs, wide ones own whole q8_1 blocks.
inline constexpr int kUpNarrow = kQ8Block / 2;
inline constexpr int kUpWide = kQ8Block;

// Exact-token instances exist up to this many tokens; above, one instance serves any number up to kMaxTokens.
// (On gfx1201 both compilers spill an exact P4 at 8 tokens, and need 224 registers at 6.)
inline constexpr int kExactTokens = 4;

// Shared memory that any card gives a block without asking.
inline constexpr std::size_t kPlainSharedLimit = 48 * 1024;

// What the launches of one kernel have in common. Staged and P4 take theirs from the same call.
struct DownPlan {
    int grid;
    int block;
    std::size_t shared_bytes;  // dynamic, for `tokens`
    int tokens;
    bool exact;         // an exact-token instance
    bool large_shared;  // maximum dynamic size and 100 % carve-out are asked for
};

constexpr std::size_t down_shared_bytes(int variant, int tokens) {
    const int tiles = (variant == kHcStaged || variant == kHcRegisterHalf) ? 2 : 1;
    return static_cast<std::size_t>(tiles) * static_cast<std::size_t>(tokens) * kTile * sizeof(float);
}

// Tokens that one launch of the down projection takes on a card whose blocks may have `shared_limit` bytes.
constexpr int down_token_limit(int variant, std::size_t shared_limit) {
    const std::size_t fit = shared_limit / down_shared_bytes(variant, 1);
    return fit < static_cast<std::size_t>(kMaxTokens) ? static_cast<int>(fit) : kMaxTokens;
}

constexpr DownPlan down_plan(int variant, int tokens, bool inject) {
    const bool tuned_tiles = variant == kHcStaged || variant == kHcRegisterHalf;
    return {kDownBlocks + (inject ? 1 : 0),        kDownThreads, down_shared_bytes(variant, tokens), tokens,
            tuned_tiles && tokens <= kExactTokens, tuned_tiles};
}

// `total` tokens in as few parts of at most `limit` as possible, of sizes that differ by one at most: two launches of
// four tokens cost less than one of six and one of two, whose weights are read as often. Part `index` of them.
constexpr std::int64_t part_count(std::int64_t total, std::int64_t limit) { return (total + limit - 1) / limit; }

struct TokenPart {
    std::int64_t first;
    int count;
};

constexpr TokenPart token_part(std::int64_t total, std::int64_t limit, std::int64_t index) {
    const std::int64_t parts = part_count(total, limit);
    const std::int64_t small = total / parts;
    const std::int64_t larger = total % parts;  // the first `larger` parts take one more
    const std::int64_t before = index < larger ? index : larger;
    return {index * small + before, static_cast<int>(small + (index < larger ? 1 : 0))};
}

// ---------------------------------------------------------------------------------------------------------------
// Scratch of one call: the normalised activations of one group of tokens, then a counter for each q8_1 block column.

constexpr std::int64_t group_tokens(std::int64_t tokens) { return tokens < kMaxTokens ? tokens : kMaxTokens; }

constexpr std::int64_t scratch_counter_offset(const Geometry& g, std::int64_t tokens) {
    return group_tokens(tokens) * g.depth() * static_cast<std::int64_t>(sizeof(float));
}

constexpr std::int64_t scratch_bytes(const Geometry& g, std::int64_t tokens) {
    return scratch_counter_offset(g, tokens) + g.width / kQ8Block * static_cast<std::int64_t>(sizeof(unsigned));
}

static_assert(down_token_limit(kHcStaged, 48 * 1024) == 4 && down_token_limit(kHcStaged, 64 * 1024) == 6);
static_assert(down_token_limit(kHcStaged, 99 * 1024) == 8 && down_token_limit(kHcStaged, 227 * 1024) == 8);
static_assert(down_shared_bytes(kHcPlain, kMaxTokens) <= kPlainSharedLimit, "plain and split run on every card");
static_assert(down_shared_bytes(kHcStaged, kExactTokens) <= kPlainSharedLimit);
static_assert(down_shared_bytes(kHcStaged, 3) == down_shared_bytes(kHcRegisterHalf, 3));
static_assert(part_count(0, 8) == 0 && token_part(8, 6, 0).count == 4 && token_part(8, 6, 1).first == 4);

}  // namespace strata
