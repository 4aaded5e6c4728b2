// Which variant of the read runs, and which runtime errors a process survives: constexpr rules, no GPU, no vendor
// header. The values 0, 1, 2 and 7 of STRATA_HC_SPLIT and the seven declarations below are those of the pull request
// that brought P4 (see docs/); readers of it find them here under the same names.
#pragma once

#include <cstdint>
#include <limits>
#include <string_view>

namespace strata {

// ---------------------------------------------------------------------------------------------------------------
// The variants. A new one is a row here, its kernel file and its case in gpu/launch.cu; tests, parity and benchmarks
// iterate over the rows.

inline constexpr int kHcPlain = 0;
inline constexpr int kHcSplit = 1;
inline constexpr int kHcStaged = 2;
inline constexpr int kHcRegisterHalf = 7;       // P4
inline constexpr int kHcStream = 8;             // asked for by name: the character '8' names nothing
inline constexpr int kHcTiled = 10;             // not selectable: takes reads of many tokens, see fused_gr_tiled_from
inline constexpr int kHcTiledFew = 11;          // the same, of some of them, see fused_gr_tiled
inline constexpr int kHcRuntimeGeometry = 100;  // not selectable: runs where the geometry is not the model's

struct GrVariant {
    int value;         // of STRATA_HC_SPLIT, where `selectable`
    const char* name;  // in JSON, logs and strata_ops.debug
    bool selectable;
    const char* what;
};

inline constexpr GrVariant kGrVariants[] = {
    {kHcPlain, "plain", true, "norm one block a token; activation tile copied to shared memory, then dotted"},
    {kHcSplit, "split", true, "norm one block a token and stream; down projection as plain"},
    {kHcStaged, "staged", true, "split's norm; two half-stream tiles in flight, next weights prefetched"},
    {kHcRegisterHalf, "p4", true, "staged's schedule, tile h+2 carried in registers in two halves"},
    {kHcStream, "stream", true,
     "each row shared by several blocks; weights on their way before the launch ahead has ended"},
    {kHcTiled, "tiled", false, "many tokens: tiles of rows times tiles of tokens, weights loaded once a tile"},
    {kHcTiledFew, "tiled_few", false, "tiled with smaller blocks that ask further ahead"},
    {kHcRuntimeGeometry, "runtime_geometry", false, "any supported geometry, taken at run time"},
};

constexpr const GrVariant* fused_gr_find(int value) noexcept {
    for (const GrVariant& row : kGrVariants) {
        if (row.value == value) return &row;
    }
    return nullptr;
}

constexpr const GrVariant* fused_gr_find(std::string_view name) noexcept {
    for (const GrVariant& row : kGrVariants) {
        if (name == row.name) return &row;
    }
    return nullptr;
}

// ---------------------------------------------------------------------------------------------------------------
// The selector, STRATA_HC_SPLIT.

inline constexpr const char* kSelectorVariable = "STRATA_HC_SPLIT";
inline constexpr const char* kQ8FuseVariable = "STRATA_QFUSE_HC";                 // 1: q8_1 by the 32-column up kernel
inline constexpr const char* kSelftestVariable = "STRATA_SELFTEST";               // 0: no self-test, and at most staged
inline constexpr const char* kArchOverrideVariable = "HSA_OVERRIDE_GFX_VERSION";  // ROCm's: the name may not be true
inline constexpr const char* kSelectorValues =
    "0 (plain), 1 (split), 2 (staged, also when unset), 7 (P4), stream or auto";

// Unset gives staged, and so does any character that names nothing. The caller passes a character only where the
// variable's text is exactly one long, else '\0': by first letter, "70" would ask for P4.
constexpr int fused_gr_env_variant(bool env_present, char first) noexcept {
    if (!env_present) return kHcStaged;
    switch (first) {
        case '0':
            return kHcPlain;
        case '1':
            return kHcSplit;
        case '2':
            return kHcStaged;
        case '7':
            return kHcRegisterHalf;
        default:
            return kHcStaged;
    }
}

// The character that fused_gr_env_variant is given for the variable's text.
constexpr char fused_gr_env_character(std::string_view text) noexcept { return text.size() == 1 ? text[0] : '\0'; }

// The variants of our own, which are asked for by name; kHcAuto is the wish for the fastest of them and staged.
inline constexpr int kHcAuto = 9;
inline constexpr int kNoVariant = -1;

constexpr int fused_gr_env_named(std::string_view text) noexcept {
    if (text == "stream") return kHcStream;
    if (text == "auto") return kHcAuto;
    return kNoVariant;
}

// What the variable asks for: names first, then the pull request's rule.
constexpr int fused_gr_env_want(bool env_present, std::string_view text) noexcept {
    const int named = env_present ? fused_gr_env_named(text) : kNoVariant;
    return named != kNoVariant ? named : fused_gr_env_variant(env_present, fused_gr_env_character(text));
}

constexpr const char* fused_gr_want_name(int want) noexcept {
    return want == kHcAuto ? "auto" : fused_gr_find(want)->name;
}

// Whether the text is one of kSelectorValues. Anything else, the empty text too, means staged and a warning.
constexpr bool fused_gr_env_known(std::string_view text) noexcept {
    const char c = fused_gr_env_character(text);
    return c == '0' || c == '1' || c == '2' || c == '7' || fused_gr_env_named(text) != kNoVariant;
}

// Until the self-test has run, a request for what has a gate of its own is capped at staged.
constexpr int fused_gr_capped_at_staged(int want) noexcept { return want > kHcStaged ? kHcStaged : want; }

// A variant that is not established: its kernels are its own matter, and so is an error of theirs.
constexpr bool fused_gr_has_own_gate(int variant) noexcept {
    return variant == kHcRegisterHalf || variant == kHcStream;
}

// Whose launches each begin while the one ahead of them still runs, on cards that have that. (Plain and split, which
// the others are compared with, and other geometries wait in order.)
constexpr bool fused_gr_overlaps(int variant) noexcept {
    return variant != kHcPlain && variant != kHcSplit && variant != kHcRuntimeGeometry;
}

// Only an explicit request on gfx1200 or gfx1201 ever launches the candidate.
constexpr bool fused_gr_p4_selftest_requested(int want, bool gfx12) noexcept {
    return want == kHcRegisterHalf && gfx12;
}

// The variant that the self-test compares beside the established ones: P4 as above, stream where it was asked for, or
// where the fastest was and launches overlap, which is what makes it fast (bench/NOTES.md). Never both.
constexpr int fused_gr_candidate(int want, bool gfx12, bool launches_overlap) noexcept {
    if (fused_gr_p4_selftest_requested(want, gfx12)) return kHcRegisterHalf;
    return want == kHcStream || (want == kHcAuto && launches_overlap) ? kHcStream : kNoVariant;
}

// P4 where it was asked for and its gate holds; else staged, split, plain, the first that agrees with plain.
constexpr int fused_gr_select(int want, bool split_ok, bool staged_ok, bool p4_gate_ok) noexcept {
    if (want == kHcPlain) return kHcPlain;
    if (want == kHcSplit) return split_ok ? kHcSplit : kHcPlain;
    if (want == kHcRegisterHalf && p4_gate_ok) return kHcRegisterHalf;
    if (staged_ok) return kHcStaged;
    return split_ok ? kHcSplit : kHcPlain;
}

// The same with the variants that are asked for by name.
constexpr int fused_gr_choose(int want, bool split_ok, bool staged_ok, bool p4_gate_ok, bool stream_ok) noexcept {
    if ((want == kHcStream || want == kHcAuto) && stream_ok) return kHcStream;
    return fused_gr_select(want, split_ok, staged_ok, p4_gate_ok);
}

// Where the tiled kernels passed the self-test, reads of at least so many tokens are theirs, whatever the variant:
// groups of eight would load the weights again for each. Plain and split were asked for to be what they are. (H200: 30
// us for 9 to 32 tokens; staged 39 for eight, stream 10 for each eight, and 15 without clusters. bench/NOTES.md)
inline constexpr std::int64_t kNeverTiled = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t fused_gr_tiled_from(int variant) noexcept {
    if (variant == kHcPlain || variant == kHcSplit) return kNeverTiled;
    return variant == kHcStream ? 25 : 9;
}

// Which of them. Few tiles of tokens leave most multiprocessors one block or none, which then waits for memory. (H200,
// 132 multiprocessors: 30 us instead of 37 for 32 tokens, 45 instead of 50 for 64, but 66 instead of 62 for 96.)
constexpr int fused_gr_tiled(std::int64_t tokens, int compute_units) noexcept {
    return 2 * tokens <= compute_units ? kHcTiledFew : kHcTiled;
}

// P4 equals staged, and staged equals plain: a candidate that agrees with a wrong reference is not promoted.
constexpr bool fused_gr_p4_parity_gate(bool gfx12, bool staged_ok, bool p4_ok) noexcept {
    return gfx12 && staged_ok && p4_ok;
}

constexpr bool fused_gr_p4_q32_parity_marker_ok(bool selftest_ok, bool qfuse_hc, bool staged_ok, bool p4_ok) noexcept {
    return selftest_ok && qfuse_hc && staged_ok && p4_ok;
}

// What is then said; null: nothing.
constexpr const char* fused_gr_p4_q32_parity_marker(bool selftest_ok, bool qfuse_hc, bool staged_ok,
                                                    bool p4_ok) noexcept {
    return fused_gr_p4_q32_parity_marker_ok(selftest_ok, qfuse_hc, staged_ok, p4_ok)
               ? "P4 + QFUSE_HC q32 outputs passed bitwise parity"
               : nullptr;
}

// ---------------------------------------------------------------------------------------------------------------
// Runtime error codes. Ordinary ones leave the context usable. Fatal ones, and every code that is not listed, do not:
// the process must not go on using the device. gpu/vendor/ asserts that each number is what its own header calls so.

enum class GrBackend : unsigned char { Cuda, Hip };

enum class GrErrorClass : unsigned char { Unlisted, Ordinary, Fatal };

struct GrErrorRow {
    int code;
    GrErrorClass cuda;
    GrErrorClass hip;
    const char* meaning;
};

namespace detail {
inline constexpr auto kNone = GrErrorClass::Unlisted;
inline constexpr auto kOk = GrErrorClass::Ordinary;
inline constexpr auto kBad = GrErrorClass::Fatal;
}  // namespace detail

inline constexpr GrErrorRow kGrErrors[] = {
    {0, detail::kOk, detail::kOk, "success"},
    {1, detail::kOk, detail::kOk, "invalid value"},
    {2, detail::kOk, detail::kOk, "out of memory"},
    {3, detail::kOk, detail::kOk, "not initialised"},
    {9, detail::kOk, detail::kOk, "invalid launch configuration"},
    {13, detail::kOk, detail::kOk, "invalid symbol"},
    {17, detail::kOk, detail::kOk, "invalid device pointer"},
    {21, detail::kOk, detail::kOk, "invalid copy direction"},
    {35, detail::kOk, detail::kOk, "driver too old"},
    {98, detail::kOk, detail::kOk, "invalid device function"},
    {100, detail::kOk, detail::kOk, "no device"},
    {101, detail::kOk, detail::kOk, "invalid device"},
    {200, detail::kOk, detail::kOk, "invalid kernel image"},
    {201, detail::kOk, detail::kOk, "no usable context"},
    {209, detail::kOk, detail::kOk, "no kernel image for the device"},
    {214, detail::kBad, detail::kBad, "uncorrectable ECC error"},
    {215, detail::kOk, detail::kOk, "unsupported limit"},
    {218, detail::kOk, detail::kOk, "invalid kernel file"},
    {226, detail::kBad, detail::kNone, "contained device error"},
    {300, detail::kOk, detail::kOk, "invalid source"},
    {301, detail::kOk, detail::kOk, "file not found"},
    {302, detail::kOk, detail::kOk, "shared object symbol not found"},
    {303, detail::kOk, detail::kOk, "shared object initialisation failed"},
    {400, detail::kOk, detail::kOk, "invalid handle"},
    {401, detail::kOk, detail::kOk, "illegal state"},
    {500, detail::kOk, detail::kOk, "symbol not found"},
    {600, detail::kOk, detail::kOk, "not ready"},
    {700, detail::kBad, detail::kBad, "illegal address"},
    {701, detail::kOk, detail::kOk, "launch out of resources"},
    {702, detail::kBad, detail::kBad, "launch timed out"},
    {708, detail::kOk, detail::kOk, "setting refused on an active process"},
    {709, detail::kBad, detail::kBad, "context destroyed"},
    {710, detail::kBad, detail::kBad, "device assertion"},
    {714, detail::kBad, detail::kNone, "hardware stack error"},
    {715, detail::kBad, detail::kNone, "illegal instruction"},
    {716, detail::kBad, detail::kNone, "misaligned address"},
    {717, detail::kBad, detail::kNone, "invalid address space"},
    {718, detail::kBad, detail::kNone, "invalid program counter"},
    {719, detail::kBad, detail::kBad, "launch failure"},
    {720, detail::kOk, detail::kOk, "cooperative launch too large"},
    {721, detail::kBad, detail::kNone, "tensor memory leak"},
    {801, detail::kOk, detail::kOk, "not supported"},
    {810, detail::kBad, detail::kNone, "multi-process client terminated"},
    {900, detail::kOk, detail::kOk, "unsupported during capture"},
    {901, detail::kOk, detail::kOk, "capture invalidated"},
    {902, detail::kOk, detail::kOk, "captures would merge"},
    {903, detail::kOk, detail::kOk, "capture unmatched"},
    {904, detail::kOk, detail::kOk, "capture unjoined"},
    {905, detail::kOk, detail::kOk, "capture isolation"},
    {906, detail::kOk, detail::kOk, "implicit dependency in capture"},
    {907, detail::kOk, detail::kOk, "captured event"},
    {908, detail::kOk, detail::kOk, "capture ended on the wrong thread"},
    {910, detail::kOk, detail::kOk, "graph update refused"},
    {911, detail::kBad, detail::kOk, "external device error; on HIP an invalid channel descriptor"},
    {912, detail::kOk, detail::kOk, "invalid cluster size; on HIP an invalid texture"},
    {999, detail::kBad, detail::kBad, "unknown error"},
    {1052, detail::kNone, detail::kBad, "HSA memory call failed"},
    {1053, detail::kNone, detail::kBad, "HSA call failed"},
};

constexpr GrErrorClass fused_gr_error_class(int err, GrBackend backend) noexcept {
    for (const GrErrorRow& row : kGrErrors) {
        if (row.code == err) return backend == GrBackend::Cuda ? row.cuda : row.hip;
    }
    return GrErrorClass::Unlisted;
}

constexpr bool fused_gr_context_fatal(int err, GrBackend backend) noexcept {
    return fused_gr_error_class(err, backend) != GrErrorClass::Ordinary;
}

// ---------------------------------------------------------------------------------------------------------------
// The tables that a change of a rule must change too.

static_assert(fused_gr_env_variant(false, '7') == kHcStaged, "unset is staged, whatever the character");
static_assert(fused_gr_env_variant(true, '0') == 0 && fused_gr_env_variant(true, '1') == 1 &&
              fused_gr_env_variant(true, '2') == 2 && fused_gr_env_variant(true, '7') == 7);
static_assert(fused_gr_env_variant(true, '\0') == kHcStaged && fused_gr_env_variant(true, '3') == kHcStaged);
static_assert(fused_gr_env_character("7") == '7' && fused_gr_env_character("70") == '\0' &&
              fused_gr_env_character("") == '\0' && fused_gr_env_character(" 7") == '\0');
static_assert(fused_gr_p4_selftest_requested(7, true) && !fused_gr_p4_selftest_requested(7, false) &&
              !fused_gr_p4_selftest_requested(2, true));
static_assert(fused_gr_select(7, true, true, true) == 7 && fused_gr_select(7, true, true, false) == 2 &&
              fused_gr_select(7, true, false, false) == 1 && fused_gr_select(7, false, false, false) == 0);
static_assert(fused_gr_env_want(true, "stream") == kHcStream && fused_gr_env_want(true, "auto") == kHcAuto &&
              fused_gr_env_want(true, "8") == kHcStaged && fused_gr_env_want(true, "streams") == kHcStaged &&
              fused_gr_env_want(true, "7") == kHcRegisterHalf && fused_gr_env_want(false, "stream") == kHcStaged);
static_assert(fused_gr_candidate(kHcAuto, true, false) == kNoVariant &&
                  fused_gr_candidate(7, false, true) == kNoVariant,
              "auto never asks for P4, nor 7 for stream");
static_assert(fused_gr_choose(kHcAuto, true, true, true, false) == 2 &&
              fused_gr_choose(7, true, true, false, true) == 2 && fused_gr_choose(2, true, true, true, true) == 2);
static_assert(fused_gr_tiled_from(0) == kNeverTiled && fused_gr_tiled_from(1) == kNeverTiled &&
                  fused_gr_tiled_from(2) > 8 && fused_gr_tiled_from(7) > 8 && fused_gr_tiled_from(kHcStream) > 8,
              "what one group of launches takes is the variant's own");
static_assert(fused_gr_select(2, true, true, true) == 2, "nothing but 7 ever selects P4");
static_assert(fused_gr_context_fatal(911, GrBackend::Cuda) && !fused_gr_context_fatal(911, GrBackend::Hip));
static_assert(fused_gr_context_fatal(12345, GrBackend::Cuda) && fused_gr_context_fatal(-1, GrBackend::Hip));

}  // namespace strata
