// The seven functions of the policy header over every combination of their arguments, against what the pull request
// that brought P4 says, written down here once more. No GPU, no vendor header.
#include "common/fused_gr_policy.hpp"

#include <set>
#include <string>
#include <utility>

#include "check.hpp"

using namespace strata;

namespace {

void signatures() {
    // As the pull request declares them.
    constexpr int (*env_variant)(bool, char) noexcept = fused_gr_env_variant;
    constexpr bool (*selftest_requested)(int, bool) noexcept = fused_gr_p4_selftest_requested;
    constexpr int (*select)(int, bool, bool, bool) noexcept = fused_gr_select;
    constexpr bool (*parity_gate)(bool, bool, bool) noexcept = fused_gr_p4_parity_gate;
    constexpr bool (*marker_ok)(bool, bool, bool, bool) noexcept = fused_gr_p4_q32_parity_marker_ok;
    constexpr bool (*context_fatal)(int, GrBackend) noexcept = fused_gr_context_fatal;
    static_assert(sizeof(GrBackend) == 1 && GrBackend::Cuda != GrBackend::Hip);
    CHECK(env_variant && selftest_requested && select && parity_gate && marker_ok && context_fatal);
    CHECK(kHcRegisterHalf == 7, kHcRegisterHalf);
}

void selector() {
    for (int character = 0; character < 256; ++character) {
        const char c = static_cast<char>(character);
        int expected = 2;
        if (character == 48) expected = 0;
        if (character == 49) expected = 1;
        if (character == 55) expected = 7;
        CHECK(fused_gr_env_variant(true, c) == expected, character);
        CHECK(fused_gr_env_variant(false, c) == 2, character);

        // The text of the variable: one character stands for itself, any other length for none.
        const std::string one(1, c);
        CHECK(fused_gr_env_character(one) == c, character);
        CHECK(fused_gr_env_known(one) == (std::string("0127").find(c) != std::string::npos), character);
        for (const std::string& text : {one + one, one + "7", "7" + one, one + " ", one + '\0'}) {
            CHECK(fused_gr_env_character(text) == '\0', character, text.size());
            CHECK(!fused_gr_env_known(text), character, text.size());
            CHECK(fused_gr_env_variant(true, fused_gr_env_character(text)) == 2, character, text.size());
        }
    }
    CHECK(fused_gr_env_character("") == '\0' && !fused_gr_env_known(""));
    CHECK(fused_gr_env_variant(true, fused_gr_env_character("")) == 2);
}

void requests() {
    for (int want = -300; want <= 300; ++want) {
        CHECK(!fused_gr_p4_selftest_requested(want, false), want);
        CHECK(fused_gr_p4_selftest_requested(want, true) == (want == 7), want);
        CHECK(fused_gr_capped_at_staged(want) == (want > 2 ? 2 : want), want);
    }
}

// What is selected, by [split_ok][staged_ok][p4_gate_ok].
struct Selection {
    int want;
    int selected[2][2][2];
};

constexpr Selection kSelections[] = {
    // split fails:  staged fails  staged holds     split holds:  staged fails  staged holds
    {0, {{{0, 0}, {0, 0}}, {{0, 0}, {0, 0}}}},
    {1, {{{0, 0}, {0, 0}}, {{1, 1}, {1, 1}}}},
    {2, {{{0, 0}, {2, 2}}, {{1, 1}, {2, 2}}}},
    {7, {{{0, 7}, {2, 7}}, {{1, 7}, {2, 7}}}},
};

void selection() {
    for (int split = 0; split < 2; ++split) {
        for (int staged = 0; staged < 2; ++staged) {
            for (int gate = 0; gate < 2; ++gate) {
                for (const Selection& row : kSelections) {
                    CHECK(fused_gr_select(row.want, split, staged, gate) == row.selected[split][staged][gate], row.want,
                          split, staged, gate);
                }
                // A value that names no variant is staged's.
                for (int want = -300; want <= 300; ++want) {
                    if (want == 0 || want == 1 || want == 2 || want == 7) continue;
                    CHECK(fused_gr_select(want, split, staged, gate) == kSelections[2].selected[split][staged][gate],
                          want, split, staged, gate);
                }
            }
        }
    }
}

// The whole way from the variable to the variant: P4 is reached by one text, on one kind of card, through both gates.
void promotion() {
    int promoted = 0;
    for (const char* text : {"", "0", "1", "2", "3", "7", "70", "07", " 7", "p4", "staged"}) {
        const int want = fused_gr_env_variant(true, fused_gr_env_character(text));
        for (int bits = 0; bits < 16; ++bits) {
            const bool gfx12 = bits & 1, split_ok = bits & 2, staged_ok = bits & 4, p4_equal = bits & 8;
            const bool p4_ok = fused_gr_p4_selftest_requested(want, gfx12) && p4_equal;
            const bool gate = fused_gr_p4_parity_gate(gfx12, staged_ok, p4_ok);
            const bool is_p4 = fused_gr_select(want, split_ok, staged_ok, gate) == 7;
            CHECK(is_p4 == (std::string(text) == "7" && gfx12 && staged_ok && p4_equal), text, bits);
            promoted += is_p4;
        }
    }
    CHECK(promoted == 2, promoted);  // split failing or holding
}

void gates() {
    for (int bits = 0; bits < 16; ++bits) {
        const bool a = bits & 1, b = bits & 2, c = bits & 4, d = bits & 8;
        CHECK(fused_gr_p4_q32_parity_marker_ok(a, b, c, d) == (bits == 15), bits);
        const char* marker = fused_gr_p4_q32_parity_marker(a, b, c, d);
        CHECK(bits == 15 ? std::string(marker) == "P4 + QFUSE_HC q32 outputs passed bitwise parity" : marker == nullptr,
              bits);
        if (bits < 8) CHECK(fused_gr_p4_parity_gate(a, b, c) == (bits == 7), bits);
    }
}

// The pull request's fatal codes.
const std::set<int> kFatalBoth = {700, 702, 709, 710, 719, 214};
const std::set<int> kFatalCuda = {226, 714, 715, 716, 717, 718, 721, 810, 911};
const std::set<int> kFatalHip = {1052, 1053};

// Ordinary API and resource errors. Whatever is on none of these lists, 999 ("unknown") too, fails closed.
const std::set<int> kOrdinaryBoth = {0,   1,   2,   3,   9,   13,  17,  21,  35,  98,  100, 101, 200, 201,
                                     209, 215, 218, 300, 301, 302, 303, 400, 401, 500, 600, 701, 708, 720,
                                     801, 900, 901, 902, 903, 904, 905, 906, 907, 908, 910, 912};
const std::set<int> kOrdinaryHip = {911};  // an invalid channel descriptor there

void errors() {
    for (int code = -2; code <= 2000; ++code) {
        const bool ordinary_cuda = kOrdinaryBoth.count(code) > 0;
        const bool ordinary_hip = ordinary_cuda || kOrdinaryHip.count(code) > 0;
        CHECK(fused_gr_context_fatal(code, GrBackend::Cuda) == !ordinary_cuda, code);
        CHECK(fused_gr_context_fatal(code, GrBackend::Hip) == !ordinary_hip, code);

        const bool listed_cuda = kFatalBoth.count(code) || kFatalCuda.count(code) || code == 999;
        const bool listed_hip = kFatalBoth.count(code) || kFatalHip.count(code) || code == 999;
        CHECK((fused_gr_error_class(code, GrBackend::Cuda) == GrErrorClass::Fatal) == listed_cuda, code);
        CHECK((fused_gr_error_class(code, GrBackend::Hip) == GrErrorClass::Fatal) == listed_hip, code);
    }
    for (const int code : {2001, 4096, 1 << 20, 0x7fffffff, -0x7fffffff - 1}) {
        CHECK(fused_gr_context_fatal(code, GrBackend::Cuda) && fused_gr_context_fatal(code, GrBackend::Hip), code);
    }
    std::set<int> seen;
    for (const GrErrorRow& row : kGrErrors) CHECK(seen.insert(row.code).second, row.code);  // one row a code
}

}  // namespace

int main() {
    signatures();
    selector();
    requests();
    selection();
    promotion();
    gates();
    errors();
    return strata::test::result();
}
