// The promotion gate, end to end on simulated cards: what is chosen and said, and which planted faults are caught. (How
// each runtime error ends: sim_errors.cpp.)
//
//   sim_gate choices | full CARD STRIDE | faults | once      one part, for CTest to run them side by side
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "common/selftest_cases.hpp"
#include "gate_scenarios.hpp"
#include "stand_in.hpp"

using namespace strata;
using namespace strata::test;
using gpu::Fault;

namespace {

// Variants in which a fault is planted.
constexpr unsigned kP4 = 1u << kHcRegisterHalf;
constexpr unsigned kStaged = 1u << kHcStaged;
constexpr unsigned kSplit = 1u << kHcSplit;
constexpr unsigned kStream = 1u << kHcStream;
constexpr unsigned kTiled = 1u << kHcTiled;
constexpr unsigned kTiledFew = 1u << kHcTiledFew;

// ---------------------------------------------------------------------------------------------------------------------
// Choices

struct Choice {
    const char* card;
    const char* value;  // of STRATA_HC_SPLIT; null: unset
    const char* chosen;
    bool candidate;    // P4 was launched in the self-test
    const char* line;  // a line with this text and level was said; null: none of ours at all
    int level;
};

constexpr int kInfo = 0, kWarning = 1;

constexpr const char* kOptIn = "P4 is opt-in through STRATA_HC_SPLIT=7";
constexpr const char* kRestricted = "P4 is restricted to gfx1200 and gfx1201";
constexpr const char* kPassed = "P4 passed bitwise parity with staged and is selected";
constexpr const char* kStreamPassed = "stream passed bitwise parity with plain and is selected";
constexpr const char* kNoOverlap = "launches do not overlap here, so STRATA_HC_SPLIT=auto is staged";
constexpr const char* kNoVariantText = "names no variant";
constexpr const char* kMarker = "P4 + QFUSE_HC q32 outputs passed bitwise parity";

constexpr Choice kChoices[] = {
    {"gfx1200", nullptr, "staged", false, kOptIn, kInfo},
    {"gfx1200", "0", "plain", false, kOptIn, kInfo},
    {"gfx1200", "1", "split", false, kOptIn, kInfo},
    {"gfx1200", "2", "staged", false, kOptIn, kInfo},
    {"gfx1200", "7", "p4", true, kPassed, kInfo},
    {"gfx1201", nullptr, "staged", false, kOptIn, kInfo},
    {"gfx1201", "0", "plain", false, kOptIn, kInfo},
    {"gfx1201", "1", "split", false, kOptIn, kInfo},
    {"gfx1201", "2", "staged", false, kOptIn, kInfo},
    {"gfx1201", "7", "p4", true, kPassed, kInfo},
    {"gfx1201", "70", "staged", false, kNoVariantText, kWarning},
    {"gfx1201", "", "staged", false, kNoVariantText, kWarning},
    {"gfx1201", "p4", "staged", false, kNoVariantText, kWarning},
    {"gfx1100", nullptr, "staged", false, nullptr, 0},
    {"gfx1100", "0", "plain", false, nullptr, 0},
    {"gfx1100", "1", "split", false, nullptr, 0},
    {"gfx1100", "2", "staged", false, nullptr, 0},
    {"gfx1100", "7", "staged", false, kRestricted, kWarning},
    {"gfx942", nullptr, "staged", false, nullptr, 0},
    {"gfx942", "7", "staged", false, kRestricted, kWarning},
    {"gfx90a", "7", "staged", false, kRestricted, kWarning},
    {"sm_75", "7", "staged", false, kRestricted, kWarning},
    {"sm_90", nullptr, "staged", false, nullptr, 0},
    {"sm_90", "0", "plain", false, nullptr, 0},
    {"sm_90", "1", "split", false, nullptr, 0},
    {"sm_90", "7", "staged", false, kRestricted, kWarning},
    {"sm_90", "x", "staged", false, kNoVariantText, kWarning},
    {"sm_120", "7", "staged", false, kRestricted, kWarning},
    {"sm_75", "stream", "stream", false, kStreamPassed, kInfo},
    {"sm_75", "auto", "staged", false, kNoOverlap, kInfo},
    {"sm_90", "stream", "stream", false, kStreamPassed, kInfo},
    {"sm_90", "auto", "stream", false, kStreamPassed, kInfo},
    {"sm_90", "8", "staged", false, kNoVariantText, kWarning},
    {"gfx942", "stream", "stream", false, kStreamPassed, kInfo},
    {"gfx942", "auto", "staged", false, kNoOverlap, kInfo},
};

// docs/variants.md says the same.
void test_documented() {
    std::string page;
    if (std::FILE* file = std::fopen(STRATA_SOURCE_DIR "/docs/variants.md", "r")) {
        char buffer[4096];
        for (std::size_t n; (n = std::fread(buffer, 1, sizeof buffer, file)) > 0;) page.append(buffer, n);
        std::fclose(file);
    }
    constexpr const char* kLevels[] = {"info", "warning"};
    for (const Choice& c : kChoices) {
        const std::string value = c.value == nullptr ? "unset" : c.value[0] == '\0' ? "(empty)" : c.value;
        std::string row = std::string("| ") + c.card + " | " + value + " | " + c.chosen + " |";
        row += c.line == nullptr ? " | |" : std::string(" ") + kLevels[c.level] + " | " + c.line + " |";
        expect(page.find(row + "\n") != std::string::npos, "docs/variants.md", "lacks the row " + row);
    }
}

void test_choices() {
    test_documented();
    for (const Choice& c : kChoices) {
        const std::string scenario = std::string(c.card) + " " + (c.value == nullptr ? "unset" : c.value);
        const bool seven = c.value != nullptr && std::strcmp(c.value, "7") == 0;
        const bool own_gate = seven || std::strcmp(c.chosen, "stream") == 0;
        Environment environment;
        if (c.value != nullptr) environment["STRATA_HC_SPLIT"] = c.value;
        const Outcome o = run(environment, [&] {
            // The rules are what is looked at: kernels run where a variant with a gate of its own is asked for, once.
            if (own_gate) {
                gpu::planted_fault().case_stride = kSelftestCases;
            } else {
                use_stand_in();
            }
            const int device = open_card(c.card);
            tell_state(device);  // before the check
            check_and_tell(device);
            tell_state(device);
        });
        expect(o.status == 0, scenario, "status " + std::to_string(o.status));
        const auto chosen = o.all("chosen");
        expect(chosen.size() == 2 && chosen[0] == (own_gate ? "staged" : c.chosen), scenario,
               "before the check a request is capped at staged, but " + (chosen.empty() ? "nothing" : chosen[0]) +
                   " runs");
        expect(chosen.size() == 2 && chosen[1] == c.chosen, scenario, "chose " + (chosen.empty() ? "" : chosen.back()));
        expect(o.all("p4_reads").back() == (c.candidate ? "1" : "0"), scenario, "P4 reads " + o.all("p4_reads").back());
        expect(o.at("completed") == "1" && o.at("unequal") == "0", scenario, "not all equal: " + o.at("first"));
        const auto lines = o.all("log");
        if (c.line == nullptr) {
            expect(lines.empty(), scenario, "said: " + (lines.empty() ? "" : lines[0]));
        } else {
            int with_text = 0;
            for (const std::string& line : lines) {
                if (line.find(c.line) == std::string::npos) continue;
                ++with_text;
                expect(line[0] == '0' + c.level, scenario, "level of: " + line);
            }
            expect(with_text == 1, scenario, "said " + std::to_string(with_text) + " times: " + c.line);
        }
        for (const std::string& line : lines) {
            expect(line.find(kMarker) == std::string::npos, scenario, "the marker without STRATA_QFUSE_HC=1");
        }
    }

    // An override says that the name may not be true: allowed, through the gates, with one warning.
    const Outcome o =
        run({{"STRATA_HC_SPLIT", "7"}, {"HSA_OVERRIDE_GFX_VERSION", "12.0.1"}, {"STRATA_QFUSE_HC", "1"}}, [] {
            gpu::planted_fault().case_stride = kSelftestCases;
            const int device = open_card("gfx1201");
            check_and_tell(device);
            tell_state(device);
        });
    int warnings = 0;
    for (const std::string& line : o.all("log")) {
        warnings += line.find("HSA_OVERRIDE_GFX_VERSION is set") != std::string::npos && line[0] == '1';
    }
    expect(o.at("chosen") == "p4" && warnings == 1, "override", "one warning and P4");
}

// The marker over its four flags, as far as they can be had together: a staged that is wrong fails the self-test too.
void test_marker() {
    const struct {
        unsigned wrong;  // variants
        bool selftest_ok, staged_ok, p4_ok;
    } rows[] = {
        {0, true, true, true},
        {kP4, true, true, false},
        {kSplit, false, true, true},
        {kSplit | kP4, false, true, false},
        {kStaged | kP4, false, false, true},
        {kStaged, false, false, false},
    };
    for (const auto& row : rows) {
        for (const bool wide : {false, true}) {
            const Outcome o = run({{"STRATA_HC_SPLIT", "7"}, {"STRATA_QFUSE_HC", wide ? "1" : "0"}}, [&] {
                use_stand_in();
                gpu::planted_fault().fault = Fault::kFlippedBit;
                gpu::planted_fault().variants = row.wrong;
                const int device = open_card("gfx1201");
                check_and_tell(device);
                tell_state(device);
            });
            const std::string scenario = "marker, wrong variants " + std::to_string(row.wrong);
            const std::string gates = std::string("plain1 split") + ((row.wrong & kSplit) != 0 ? "0" : "1") +
                                      " staged" + (row.staged_ok ? "1" : "0") + " wide1 runtime1 tiled1 p4" +
                                      (row.p4_ok ? "1" : "0");
            expect(o.at("gates") == gates, scenario, o.at("gates") + ", not " + gates);
            int markers = 0;
            for (const std::string& line : o.all("log")) markers += line == std::string("0 ") + kMarker;
            const bool all = row.selftest_ok && wide && row.staged_ok && row.p4_ok;
            expect(markers == (all ? 1 : 0), scenario, "said " + std::to_string(markers) + " times");
        }
    }
}

// The self-test at work: every `stride`-th case on a card, each with its kernels.
void test_full(const char* card, int stride) {
    const Outcome o = run({{"STRATA_HC_SPLIT", "7"}, {"STRATA_QFUSE_HC", "1"}}, [&] {
        gpu::planted_fault().case_stride = stride;
        const int device = open_card(card, 7);
        check_and_tell(device);
        tell_state(device);
    });
    const bool gfx12 = std::strncmp(card, "gfx12", 5) == 0;
    expect(o.at("completed") == "1" && o.at("unequal") == "0", card, "all equal; " + o.at("first") + o.at("report"));
    expect(o.at("chosen") == (gfx12 ? "p4" : "staged"), card, "chose " + o.at("chosen"));
    // plain, split, staged, both tiled ones and the run-time geometry in every case; the wide up kernel twice where
    // q8_1 is on.
    int cases = 0, lines = 0;
    for (int i = 0; i < kSelftestCases; i += stride) {
        const bool q8_1 = selftest_case(i).q8_1;
        ++cases;
        lines += 6 + (q8_1 ? 2 : 0) + (gfx12 ? 1 : 0) + (gfx12 && q8_1 ? 1 : 0);
    }
    expect(o.at("lines") == std::to_string(lines), card, "comparisons: " + o.at("lines"));
    expect(o.at("allocations") == "0" && o.at("streams") == "0", card, "something was left behind");
    std::printf("self-test on %s: %d cases, %s comparisons, %s runs\n", card, cases, o.at("lines").c_str(),
                o.at("chosen").c_str());
}

// ---------------------------------------------------------------------------------------------------------------------
// Planted faults

constexpr unsigned kEverything = kP4 | kStaged | kSplit | 1u << kHcPlain;

struct PlantedFault {
    const char* name;
    Fault fault;
    unsigned variants;
    int output;
    const char* card;
    const char* chosen;
    const char* caught;  // by which comparison: the variant that is found unequal first
    const char* wanted = "7";
};

constexpr PlantedFault kFaults[] = {
    {"P4: wrong swizzle", Fault::kWrongSwizzle, kP4, 0, "gfx1201", "staged", "p4"},
    {"P4: tile 2's half A not loaded before the loop", Fault::kHalfANotLoaded, kP4, 0, "gfx1201", "staged", "p4"},
    {"P4: idle groups of the inject block skip half B", Fault::kIdleSkipHalfB, kP4, 0, "gfx1201", "staged", "p4"},
    {"P4: one token's tile skipped", Fault::kTokenSkipped, kP4, 0, "gfx1201", "staged", "p4"},
    {"P4: half B from the wrong tile", Fault::kHalfBWrongTile, kP4, 0, "gfx1201", "staged", "p4"},
    {"P4: missing barrier", Fault::kMissingBarrier, kP4, 0, "gfx1201", "staged", "p4"},
    {"P4: 32-bit mask on a 64-lane wave", Fault::kNarrowMask, kP4, 0, "gfx1201:wide,64,65536,64", "staged", "p4"},
    {"P4: stale q8_1 counter", Fault::kStaleCounter, kP4, 0, "gfx1201", "staged", "p4"},
    {"P4: flipped bit in mixed", Fault::kFlippedBit, kP4, 0, "gfx1201", "staged", "p4"},
    {"P4: flipped bit in inject", Fault::kFlippedBit, kP4, 1, "gfx1201", "staged", "p4"},
    {"P4: flipped bit in residual_out", Fault::kFlippedBit, kP4, 2, "gfx1201", "staged", "p4"},
    {"P4: flipped bit in lo", Fault::kFlippedBit, kP4, 3, "gfx1201", "staged", "p4"},
    {"P4: flipped bit in rs", Fault::kFlippedBit, kP4, 4, "gfx1201", "staged", "p4"},
    {"P4: flipped bit in q8_1", Fault::kFlippedBit, kP4, 5, "gfx1201", "staged", "p4"},
    {"P4 writes nothing", Fault::kWritesNothing, kP4, 0, "gfx1201", "staged", "p4"},
    {"staged and P4 write nothing", Fault::kWritesNothing, kP4 | kStaged, 0, "gfx1201", "split", "staged"},
    {"nothing writes anything", Fault::kWritesNothing, kEverything, 0, "gfx1201", "plain", "plain"},
    {"the same wrong arithmetic everywhere", Fault::kWrongArithmetic, kEverything, 0, "gfx1201", "plain", "plain"},
    {"one flipped bit everywhere", Fault::kFlippedBit, kEverything, 3, "gfx1201", "plain", "plain"},
    {"bf16 streams cut off by split", Fault::kCutStream, kSplit, 0, "gfx1201", "p4", "split"},
    {"bf16 streams cut off everywhere", Fault::kCutStream, kEverything, 0, "gfx1201", "plain", "plain"},
    {"staged wrong, P4 right", Fault::kFlippedBit, kStaged, 0, "gfx1201", "split", "staged"},
    {"staged and P4 equally wrong", Fault::kFlippedBit, kStaged | kP4, 0, "gfx1201", "split", "staged"},
    {"split alone wrong", Fault::kFlippedBit, kSplit, 3, "gfx1201", "p4", "split"},
    {"split and staged wrong", Fault::kFlippedBit, kSplit | kStaged, 3, "gfx1201", "plain", "split"},
    {"stream: wrong arithmetic", Fault::kWrongArithmetic, kStream, 0, "sm_90", "staged", "stream", "stream"},
    {"stream without clusters: wrong arithmetic", Fault::kWrongArithmetic, kStream, 0, "sm_75", "staged", "stream",
     "stream"},
    {"stream: stale q8_1 counter", Fault::kStaleCounter, kStream, 0, "sm_90", "staged", "stream", "stream"},
    {"stream: flipped bit in residual_out", Fault::kFlippedBit, kStream, 2, "sm_90", "staged", "stream", "auto"},
    {"tiled: wrong arithmetic", Fault::kWrongArithmetic, kTiled, 0, "gfx1201", "staged", "tiled", "2"},
    {"tiled: flipped bit in lo", Fault::kFlippedBit, kTiled, 3, "sm_90", "stream", "tiled", "stream"},
    {"tiled writes nothing", Fault::kWritesNothing, kTiled, 0, "gfx942", "staged", "tiled", "2"},
    {"few tiles: flipped bit in mixed", Fault::kFlippedBit, kTiledFew, 0, "gfx1201", "staged", "tiled_few", "2"},
    {"few tiles: wrong arithmetic", Fault::kWrongArithmetic, kTiledFew, 0, "sm_90", "stream", "tiled_few", "stream"},
    {"stream writes nothing", Fault::kWritesNothing, kStream, 0, "gfx942", "staged", "stream", "stream"},
};

// The op says which bits differ, and what the CPU's are.
void expect_named(const PlantedFault& f, const std::string& text) {
    const std::string before = "does not compute what the CPU does: the self-test's plain variant differs in ";
    const std::size_t at = text.find(before);
    expect(at != std::string::npos, f.name, text);
    if (at == std::string::npos) return;
    char output[32], type[8];
    int tokens = 0, fold = 0, inject = 0, q8_1 = 0;
    long long index = 0;
    unsigned got = 0, cpu = 0;
    const int read = std::sscanf(text.c_str() + at + before.size(),
                                 "%31s of case T=%d %7s fold=%d inject=%d q8_1=%d (word %lld is 0x%8x, not 0x%8x)",
                                 output, &tokens, type, &fold, &inject, &q8_1, &index, &got, &cpu);
    expect(read == 9, f.name, "names the element: " + text);
    if (read != 9) return;
    static SelftestCpu computer;
    const StreamType stream =
        std::strcmp(type, stream_name(StreamType::BFloat16)) == 0 ? StreamType::BFloat16 : StreamType::Float32;
    const SelftestAnswer answer = computer.read({tokens, stream, fold != 0, inject != 0, q8_1 != 0}, "portable");
    int which = 0;
    while (which < kSelftestOutputs - 1 && std::strcmp(output, kSelftestOutputNames[which]) != 0) ++which;
    std::uint32_t word = 0;
    std::memcpy(&word, answer.of[which].data() + index * 4, sizeof word);
    expect(word == cpu && got != cpu, f.name, "the CPU's bits: " + text);
    if (f.fault == Fault::kFlippedBit) {
        expect(which == f.output && index == tokens / 2 && got == (cpu ^ gpu::kFlip), f.name,
               "the flipped bit: " + text);
    }
}

void test_faults() {
    for (const PlantedFault& f : kFaults) {
        const Outcome o = run({{"STRATA_HC_SPLIT", f.wanted}}, [&] {
            gpu::planted_fault().fault = f.fault;
            gpu::planted_fault().variants = f.variants;
            gpu::planted_fault().output = f.output;
            if (f.fault == Fault::kFlippedBit || f.fault == Fault::kWritesNothing) {
                use_stand_in();  // no kernel's own matter: all cases
            } else {
                gpu::planted_fault().case_stride =
                    kSelftestCases - 1;  // T = 1 without options, T = 8 with all and bf16
            }
            const int device = open_card(f.card, 3);
            check_and_tell(device);
            tell_state(device);
            Report report;
            say("read=%d", small_read(device, &report));
            say("read_says=%s", report.text);
        });
        // A fault that the card itself refuses (a shuffle with lanes missing) may lose the device instead.
        const std::string by = o.at("first").substr(0, o.at("first").find('/'));
        const bool lost = o.status == 1;
        expect(lost || (o.at("unequal") != "0" && by == f.caught), f.name, "caught by '" + o.at("first") + "'");
        expect(lost || o.at("chosen") == f.chosen, f.name, "chose " + o.at("chosen"));
        const bool plain_wrong = std::strcmp(f.caught, "plain") == 0;
        expect(lost || o.at("read") == (plain_wrong ? "0" : "1"), f.name,
               plain_wrong ? "the op raises" : "the op runs: " + o.at("read_says"));
        if (plain_wrong) expect_named(f, o.at("read_says"));
        std::printf("%-52s %s, %s runs\n", f.name, lost ? "process ended" : ("caught by " + o.at("first")).c_str(),
                    plain_wrong ? "nothing" : o.at("chosen").c_str());
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Many tokens: theirs are the tiled kernels where these passed the self-test, unless plain or split was asked for.

bool model_read(int device, std::int64_t tokens, Report* report) {
    ZeroRead read(kModelGeometry, tokens);
    return read.queue(device, report) && sim::stream_synchronize(nullptr) == 0;
}

void test_many_tokens() {
    enum class By { Others, Tiled, TiledFew };
    const struct {
        const char* card;
        const char* value;
        const char* selftest;
        unsigned wrong;
        std::int64_t tokens;
        By by;
    } rows[] = {
        {"gfx1201", "2", "1", 0, 8, By::Others},          {"gfx1201", "2", "1", 0, 9, By::TiledFew},
        {"gfx1201", "2", "1", kTiled, 9, By::Others},     {"gfx1201", "2", "1", kTiledFew, 9, By::Others},
        {"gfx1201", "2", "0", 0, 9, By::Others},          {"gfx1201", "0", "1", 0, 9, By::Others},
        {"gfx1201", "1", "1", 0, 9, By::Others},          {"gfx1201", "7", "1", 0, 9, By::TiledFew},
        {"sm_90", "stream", "1", 0, 24, By::Others},      {"sm_90", "stream", "1", 0, 25, By::TiledFew},
        {"sm_90", "stream", "1", 0, 66, By::TiledFew},    {"sm_90", "stream", "1", 0, 67, By::Tiled},
        {"gfx90a,64,49152,4", "2", "1", 0, 9, By::Tiled},
    };
    for (const auto& row : rows) {
        const Outcome o = run({{"STRATA_HC_SPLIT", row.value}, {"STRATA_SELFTEST", row.selftest}}, [&] {
            gpu::planted_fault().case_stride = kSelftestCases;
            gpu::planted_fault().fault = row.wrong != 0 ? Fault::kWrongArithmetic : Fault::kNone;
            gpu::planted_fault().variants = row.wrong;
            const int device = open_card(row.card);
            Report report;
            say("read=%d %s", model_read(device, 1, &report), report.text);
            tell_state(device);
            say("read=%d %s", model_read(device, row.tokens, &report), report.text);
            tell_state(device);
        });
        const std::string scenario =
            std::string(row.card) + " " + row.value + ", " + std::to_string(row.tokens) + " tokens";
        const auto tiled = o.all("tiled_reads"), few = o.all("tiled_few_reads");
        expect(o.status == 0 && o.all("read") == std::vector<std::string>{"1 ", "1 "}, scenario, o.at("read"));
        expect(tiled.size() == 2 && (tiled[0] != tiled[1]) == (row.by == By::Tiled), scenario, "tiled");
        expect(few.size() == 2 && (few[0] != few[1]) == (row.by == By::TiledFew), scenario, "tiled, few tiles");
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// When: once, under many threads, never in a capture, not at all on request.

void test_once() {
    {
        const Outcome o = run({{"STRATA_HC_SPLIT", "7"}}, [] {
            gpu::planted_fault().case_stride = kSelftestCases;
            const int device = open_card("gfx1201");
            std::vector<std::thread> threads;
            std::atomic<int> good{0};
            for (int i = 0; i < 16; ++i) {
                threads.emplace_back([&] {
                    DeviceFacts facts{};
                    Report report;
                    good += backend().describe(device, &facts, &report);
                });
            }
            for (std::thread& t : threads) t.join();
            Report report;
            say("read=%d %s", small_read(device, &report), report.text);
            say("read=%d %s", small_read(device, &report), report.text);
            say("good=%d", good.load());
            tell_state(device);
        });
        expect(o.at("good") == "16" && o.at("read").substr(0, 1) == "1", "first read", o.at("read"));
        expect(o.at("p4_reads") == "1" && o.at("chosen") == "p4", "first read",
               "the check ran once: " + o.at("p4_reads"));
    }
    {
        const Outcome o = run({{"STRATA_HC_SPLIT", "7"}}, [] {
            gpu::planted_fault().case_stride = kSelftestCases;
            const int device = open_card("gfx1201");
            gpu::Stream stream{};
            Report report;
            say("created=%d", sim::stream_create(&stream));
            say("begun=%d", sim::begin_capture(stream, sim::CaptureMode::Global));
            say("read=%d %s", small_read(device, &report, stream), report.text);
            tell_state(device);
            std::size_t launches = 0;
            say("ended=%d", sim::end_capture(stream, &launches));
            say("captured=%zu", launches);
            say("read=%d %s", small_read(device, &report), report.text);
            tell_state(device);
        });
        const auto chosen = o.all("chosen");
        expect(o.at("ended") == "0" && o.at("captured") == "3", "capture", "three launches: " + o.at("captured"));
        expect(chosen.size() == 2 && chosen[0] == "staged" && chosen[1] == "p4", "capture",
               "no check while capturing; it runs at the next read");
    }
    {
        const Outcome o = run({{"STRATA_HC_SPLIT", "7"}}, [] {  // another stream's capture is not disturbed
            gpu::planted_fault().case_stride = kSelftestCases;
            const int device = open_card("gfx1201");
            gpu::Stream stream{};
            sim::stream_create(&stream);
            sim::begin_capture(stream, sim::CaptureMode::Global);
            std::thread other([&] {
                sim::set_device(device);
                check_and_tell(device);
            });
            other.join();
            std::size_t launches = 0;
            say("ended=%d", sim::end_capture(stream, &launches));
            tell_state(device);
        });
        expect(o.at("completed") == "1" && o.at("ended") == "0" && o.at("chosen") == "p4", "a check beside a capture",
               o.at("report"));
    }
    for (const char* value : {"7", "2", "0"}) {
        const Outcome o = run({{"STRATA_HC_SPLIT", value}, {"STRATA_SELFTEST", "0"}}, [] {
            const int device = open_card("gfx1201");
            Report report;
            say("read=%d %s", small_read(device, &report), report.text);
            check_and_tell(device);
            tell_state(device);
        });
        const std::string scenario = std::string("STRATA_SELFTEST=0 with ") + value;
        const bool seven = value[0] == '7';
        expect(o.at("read").substr(0, 1) == "1" && o.at("p4_reads") == "0", scenario, "no P4: " + o.at("p4_reads"));
        expect(o.at("chosen") == (seven || value[0] == '2' ? "staged" : "plain"), scenario, o.at("chosen"));
        expect(o.at("state") == "1" && o.at("completed") == "0", scenario, "skipped, and a check says so");
        const auto lines = o.all("log");
        expect(lines.size() == 1 && lines[0][0] == (seven ? '1' : '0'), scenario, "says so once");
    }
    {
        const Outcome o = run({{"STRATA_HC_SPLIT", "7"}}, [] {  // many devices
            gpu::planted_fault().case_stride = kSelftestCases;
            int device = 0;
            for (int i = 0; i < 70; ++i) device = open_card("gfx1201");
            check_and_tell(device);
            say("device=%d", device);
            tell_state(device);
        });
        expect(o.at("device") == "69" && o.at("chosen") == "p4", "device 69", o.at("chosen") + o.at("report"));
    }
}

}  // namespace

int main(int argc, char** argv) {
    const std::string part = argc >= 2 ? argv[1] : "";
    if (part == "choices") {
        test_choices();
        test_marker();
    } else if (part == "full" && argc == 4 && std::atoi(argv[3]) > 0) {
        test_full(argv[2], std::atoi(argv[3]));
    } else if (part == "faults") {
        test_faults();
    } else if (part == "once") {
        test_once();
        test_many_tokens();
    } else {
        std::fprintf(stderr, "usage: sim_gate choices|full CARD STRIDE|faults|once\n");
        return 2;
    }
    std::printf("%s: %d failed\n", part.c_str(), failures);
    return failures == 0 ? 0 : 1;
}
