// strata_ops._core: the rules of csrc/common for Python (checks, policy, launch plans), and a view of any backend
// library through the plain struct that it exports. No torch and no vendor runtime here.
#include <dlfcn.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/arch.hpp"
#include "common/argument_checks.hpp"
#include "common/arithmetic.hpp"
#include "common/backend.hpp"
#include "common/fused_gr_policy.hpp"
#include "common/launch_plan.hpp"

namespace py = pybind11;

namespace strata {
namespace {

// ---------------------------------------------------------------------------------------------------------------
// The checks, for fake kernels.

int row_of(const char* const* names, int count, const std::string& name) {
    for (int row = 0; row < count - 1; ++row) {
        if (name == names[row]) return row;
    }
    return count - 1;
}

// One tensor as Python describes it; owns what TensorFacts points into.
struct PyTensor {
    std::string dtype, device_type;
    int device_index;
    std::vector<std::int64_t> sizes, strides;
    std::uint64_t address;

    TensorFacts facts() const {
        TensorFacts t;
        t.present = true;
        t.dtype = row_of(kDtypes, kDtypeCount, dtype);
        t.device_type = row_of(kDeviceTypes, kDeviceTypeCount, device_type);
        t.device_index = device_index;
        t.ndim = static_cast<int>(sizes.size());
        t.sizes = sizes.data();
        t.strides = strides.data();
        t.address = address;
        return t;
    }
};

std::optional<std::string> check_from_python(const std::string& form,
                                             const std::vector<std::optional<PyTensor>>& tensors, double eps,
                                             bool q8_1) {
    ReadFacts facts;
    if (form == "functional") {
        facts.form = ReadForm::Functional;
    } else if (form == "in_place") {
        facts.form = ReadForm::InPlace;
    } else if (form == "out") {
        facts.form = ReadForm::Out;
    } else {
        throw std::invalid_argument("form must be 'functional', 'in_place' or 'out', but is '" + form + "'");
    }
    const int count = facts.form == ReadForm::Out ? kArgumentCount : kInputCount;
    if (tensors.size() != static_cast<std::size_t>(count)) {
        throw std::invalid_argument("a read has " + std::to_string(count) + " tensors in this form, but " +
                                    std::to_string(tensors.size()) + " were given");
    }
    for (int a = 0; a < count; ++a) {
        if (const auto& tensor = tensors[static_cast<std::size_t>(a)]) facts.tensor[a] = tensor->facts();
    }
    facts.eps = eps;
    facts.q8_1 = q8_1;
    Message refusal;
    if (check_read(facts, refusal)) return std::nullopt;
    return refusal.text();
}

void bind_checks(py::module_& m) {
    py::class_<PyTensor>(m, "Tensor", "A tensor as check_read sees it; a size or stride of -1 is not known.")
        .def(py::init<std::string, std::string, int, std::vector<std::int64_t>, std::vector<std::int64_t>,
                      std::uint64_t>(),
             py::arg("dtype"), py::arg("device_type"), py::arg("device_index"), py::arg("sizes"), py::arg("strides"),
             py::arg("address"));
    m.def("check_read", check_from_python, py::arg("form"), py::arg("tensors"), py::arg("eps"), py::arg("q8_1"),
          "What the op refuses in these arguments (in the schema's order), or None.");
    std::vector<std::string> names;
    for (const ArgumentRow& row : kArguments) names.emplace_back(row.name);
    m.attr("ARGUMENTS") = py::tuple(py::cast(names));
    m.attr("MAX_DIMENSIONS") = kMaxDimensions;
}

// ---------------------------------------------------------------------------------------------------------------
// Geometry, policy and launch plans.

void bind_geometry(py::module_& m) {
    m.attr("ARITHMETIC_VERSION") = kArithmeticVersion;
    m.attr("MODEL_GEOMETRY") = py::make_tuple(kModelGeometry.width, kModelGeometry.streams, kModelGeometry.rank);
    m.attr("WIDTH_MULTIPLE") = kWidthMultiple;
    m.attr("MAX_STREAMS") = kMaxStreams;
    m.attr("RANK_MULTIPLE") = kRankMultiple;
    m.attr("MAX_TOKENS") = kMaxTokens;
    m.attr("ALIGNMENT") = kAlignment;
    m.attr("Q8_BLOCK") = kQ8Block;
    m.attr("Q8_BYTES") = kQ8Bytes;
    m.attr("STREAM_DTYPES") =
        py::make_tuple(kDtypes[stream_dtype(StreamType::Float32)],
                       kDtypes[stream_dtype(StreamType::BFloat16)]);  // in the order of StreamType
    m.def(
        "geometry_supported",
        [](std::int64_t width, std::int64_t streams, std::int64_t rank) {
            return geometry_supported({width, streams, rank});
        },
        py::arg("width"), py::arg("streams"), py::arg("rank"));
}

const char* class_name(GrErrorClass error) {
    return error == GrErrorClass::Ordinary ? "ordinary" : error == GrErrorClass::Fatal ? "fatal" : "unlisted";
}

GrBackend error_backend(const std::string& name) {
    if (name == "cuda") return GrBackend::Cuda;
    if (name == "hip") return GrBackend::Hip;
    throw std::invalid_argument("backend must be 'cuda' or 'hip', but is '" + name + "'");
}

// The functions of fused_gr_policy.hpp under their own names.
void bind_policy(py::module_& m) {
    py::class_<GrVariant>(m, "Variant")
        .def_readonly("value", &GrVariant::value)
        .def_readonly("name", &GrVariant::name)
        .def_readonly("selectable", &GrVariant::selectable)
        .def_readonly("what", &GrVariant::what);
    std::vector<GrVariant> variants(std::begin(kGrVariants), std::end(kGrVariants));
    m.attr("VARIANTS") = py::tuple(py::cast(variants));
    m.attr("SELECTOR_VARIABLE") = kSelectorVariable;
    m.attr("SELECTOR_VALUES") = kSelectorValues;
    m.attr("Q8_FUSE_VARIABLE") = kQ8FuseVariable;
    m.attr("SELFTEST_VARIABLE") = kSelftestVariable;
    m.attr("ARCH_OVERRIDE_VARIABLE") = kArchOverrideVariable;

    m.def(
        "fused_gr_env_variant",
        [](bool present, const std::string& first) {
            return fused_gr_env_variant(present, first.empty() ? '\0' : first[0]);
        },
        py::arg("env_present"), py::arg("first"));
    m.def("fused_gr_env_character", [](const std::string& text) {
        const char c = fused_gr_env_character(text);
        return c == '\0' ? std::string() : std::string(1, c);
    });
    m.def("fused_gr_env_known", [](const std::string& text) { return fused_gr_env_known(text); });
    m.def("fused_gr_capped_at_staged", fused_gr_capped_at_staged, py::arg("want"));
    m.def("fused_gr_p4_selftest_requested", fused_gr_p4_selftest_requested, py::arg("want"), py::arg("gfx12"));
    m.def("fused_gr_select", fused_gr_select, py::arg("want"), py::arg("split_ok"), py::arg("staged_ok"),
          py::arg("p4_gate_ok"));
    m.def("fused_gr_p4_parity_gate", fused_gr_p4_parity_gate, py::arg("gfx12"), py::arg("staged_ok"), py::arg("p4_ok"));
    m.def("fused_gr_p4_q32_parity_marker_ok", fused_gr_p4_q32_parity_marker_ok, py::arg("selftest_ok"),
          py::arg("qfuse_hc"), py::arg("staged_ok"), py::arg("p4_ok"));
    m.def(
        "fused_gr_context_fatal",
        [](int err, const std::string& backend) { return fused_gr_context_fatal(err, error_backend(backend)); },
        py::arg("err"), py::arg("backend"));
    m.def(
        "fused_gr_error_class",
        [](int err, const std::string& backend) {
            return class_name(fused_gr_error_class(err, error_backend(backend)));
        },
        py::arg("err"), py::arg("backend"));
    m.def("arch_is_gfx12", [](const std::string& name) { return arch_is_gfx12(name); }, py::arg("name"));
}

void bind_launch_plan(py::module_& m) {
    py::class_<DownPlan>(m, "DownPlan")
        .def_readonly("grid", &DownPlan::grid)
        .def_readonly("block", &DownPlan::block)
        .def_readonly("shared_bytes", &DownPlan::shared_bytes)
        .def_readonly("tokens", &DownPlan::tokens)
        .def_readonly("exact", &DownPlan::exact)
        .def_readonly("large_shared", &DownPlan::large_shared);
    m.def("down_plan", down_plan, py::arg("variant"), py::arg("tokens"), py::arg("inject"));
    m.def("down_shared_bytes", down_shared_bytes, py::arg("variant"), py::arg("tokens"));
    m.def("down_token_limit", down_token_limit, py::arg("variant"), py::arg("shared_limit"));
    m.def(
        "token_parts",
        [](std::int64_t total, std::int64_t limit) {
            std::vector<std::pair<std::int64_t, int>> parts;
            for (std::int64_t i = 0; i < part_count(total, limit); ++i) {
                const TokenPart part = token_part(total, limit, i);
                parts.emplace_back(part.first, part.count);
            }
            return parts;
        },
        py::arg("total"), py::arg("limit"), "(first, count) of each part that `total` tokens are cut into.");
    m.def(
        "scratch_bytes",
        [](std::int64_t width, std::int64_t streams, std::int64_t rank, std::int64_t tokens) {
            return scratch_bytes({width, streams, rank}, tokens);
        },
        py::arg("width"), py::arg("streams"), py::arg("rank"), py::arg("tokens"));
}

// ---------------------------------------------------------------------------------------------------------------
// Backend libraries.

// A library stays loaded once it is: its kernels may be registered with torch.
const Backend& load_backend(const std::string& path) {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw std::runtime_error(std::string("cannot load the backend: ") + dlerror());
    void* symbol = dlsym(library, "strata_backend");
    if (symbol == nullptr) throw std::runtime_error(path + " is no backend: it has no strata_backend");
    const Backend* (*function)();
    std::memcpy(&function, &symbol, sizeof function);
    const Backend* backend = function();
    if (backend->abi != kBackendAbi) {
        throw std::runtime_error(path + " speaks version " + std::to_string(backend->abi) +
                                 " of the backend struct, but strata_ops._core version " + std::to_string(kBackendAbi) +
                                 "; build and install strata_ops anew");
    }
    return *backend;
}

std::vector<std::string> names_of(const char* list) {
    std::vector<std::string> names;
    std::string name;
    for (const char* c = list;; ++c) {
        if (*c != ',' && *c != '\0') {
            if (*c != ' ') name += *c;
            continue;
        }
        if (!name.empty()) names.push_back(name);
        name.clear();
        if (*c == '\0') return names;
    }
}

const char* state_name(CheckState state) {
    switch (state) {
        case CheckState::NotRun:
            return "not run";
        case CheckState::Skipped:
            return "skipped";
        case CheckState::NotCompleted:
            return "not completed";
        default:
            return "completed";
    }
}

py::dict gates_dict(const Gates& gates) {
    py::dict d;
    d["state"] = state_name(gates.state);
    d["plain"] = gates.plain;
    d["split"] = gates.split;
    d["staged"] = gates.staged;
    d["wide_up"] = gates.wide_up;
    d["runtime_geometry"] = gates.runtime_geometry;
    d["tiled"] = gates.tiled;
    d["p4"] = gates.p4;
    d["stream"] = gates.stream;
    return d;
}

py::dict device_dict(const Backend& backend, int device) {
    DeviceFacts facts{};
    Report report;
    bool described = false;
    {
        py::gil_scoped_release others_run;
        described = backend.describe(device, &facts, &report);
    }
    if (!described) throw std::runtime_error(report.text);
    py::dict d;
    d["index"] = device;
    d["name"] = facts.name;
    d["arch"] = facts.arch;
    d["wave_width"] = facts.wave_width;
    d["compute_units"] = facts.compute_units;
    d["shared_bytes"] = facts.shared_bytes;
    d["want"] = facts.want;
    d["chosen"] = facts.chosen;
    d["why"] = facts.why;
    if (backend.check != nullptr) d["gates"] = gates_dict(facts.gates);
    return d;
}

// Runs the self-test of a device and returns its comparisons, each as a dictionary.
py::list check_device(const Backend& backend, int device) {
    std::vector<CheckLine> lines;
    Report report;
    bool completed = false;
    {
        py::gil_scoped_release others_run;  // and may log
        completed = backend.check(
            device,
            [](const CheckLine* line, void* context) {
                static_cast<std::vector<CheckLine>*>(context)->push_back(*line);
            },
            &lines, &report);
    }
    if (!completed) throw std::runtime_error(report.text);
    py::list all;
    for (const CheckLine& line : lines) {
        py::dict d;
        d["tokens"] = line.tokens;
        d["stream_dtype"] = kDtypes[stream_dtype(line.stream_type)];
        d["fold"] = line.fold;
        d["inject"] = line.inject;
        d["q8_1"] = line.q8_1;
        d["variant"] = line.variant;
        d["q8_columns"] = line.q8_columns;
        d["against"] = line.against;
        d["equal"] = line.equal;
        if (!line.equal) {
            py::dict difference;
            difference["output"] = line.output;
            const bool element = line.expected != line.got;  // else no more than a hash is known
            difference["index"] = element ? py::cast(line.index) : py::none();
            difference["expected"] = element ? py::cast(line.expected) : py::none();
            difference["got"] = element ? py::cast(line.got) : py::none();
            d["first_difference"] = difference;
        }
        all.append(d);
    }
    return all;
}

// Lines of all backends go to this callable of (level, line). It lives as long as the process: a backend may speak
// until then.
py::object* listener = nullptr;

void tell_listener(LogLevel level, const char* line) {
    if (!Py_IsInitialized()) {
        std::fprintf(stderr, "strata_ops: %s\n", line);
        return;
    }
    const py::gil_scoped_acquire gil;
    try {
        (*listener)(static_cast<int>(level), line);
    } catch (py::error_already_set& error) {  // a logging handler's own failure does not fail a read
        error.discard_as_unraisable("strata_ops: logging");
    }
}

void listen(const Backend& backend, py::object callable) {
    if (listener == nullptr) listener = new py::object;
    *listener = std::move(callable);
    if (backend.set_log != nullptr) backend.set_log(tell_listener);
}

void bind_backends(py::module_& m) {
    m.attr("BACKEND_ABI") = kBackendAbi;
    py::class_<Backend>(m, "Backend")
        .def_readonly("abi", &Backend::abi)
        .def_readonly("name", &Backend::name)
        .def_readonly("built_for", &Backend::built_for)
        .def_property_readonly("variants", [](const Backend& b) { return names_of(b.variants); })
        .def(
            "device_count",
            [](const Backend& b) {
                Report report;
                const int count = b.device_count(&report);
                if (count < 0) throw std::runtime_error(report.text);
                return count;
            },
            "Devices that can be used; RuntimeError with the runtime's reason where there are none.")
        .def("describe", device_dict, py::arg("device"))
        .def_property_readonly("has_check", [](const Backend& b) { return b.check != nullptr; })
        .def("check", check_device, py::arg("device"),
             "Runs the self-test of a device: a list of comparisons. RuntimeError where it did not complete.")
        .def(
            "set_witness",
            [](const Backend& b, const Backend& cpu) {
                if (b.set_witness != nullptr) b.set_witness(&cpu);
            },
            py::arg("cpu"), "Names the CPU's backend, which tells the self-test the element where plain differs.")
        .def("listen", listen, py::arg("callable"), "Sends what the backend says to callable(level, line).")
        .def(
            "scratch_size",
            [](const Backend& b, std::int64_t width, std::int64_t streams, std::int64_t rank, std::int64_t tokens) {
                const Geometry geometry{width, streams, rank};
                return b.scratch_size(&geometry, tokens);
            },
            py::arg("width"), py::arg("streams"), py::arg("rank"), py::arg("tokens"));
    m.def("load_backend", load_backend, py::arg("path"), py::return_value_policy::reference,
          "The backend of a library, which is loaded if it is not yet.");
}

}  // namespace
}  // namespace strata

PYBIND11_MODULE(_core, m) {
    m.doc() = "The rules of strata_ops that need neither torch nor a GPU, and a view of its backend libraries.";
    strata::bind_checks(m);
    strata::bind_geometry(m);
    strata::bind_policy(m);
    strata::bind_launch_plan(m);
    strata::bind_backends(m);
}
