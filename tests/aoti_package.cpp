// Runs a model that AOTInductor has packaged, with no Python: PACKAGE, INPUTS (torch.save of a list of tensors),
// OUTPUTS (for torch.load: a tuple), then the libraries whose ops the model calls. Built by test_compile.py.
#include <ATen/core/ivalue.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <fstream>
#include <iostream>
#include <iterator>
#include <vector>

int main(int count, char** words) {
    if (count < 4) {
        std::cerr << "usage: aoti_package PACKAGE INPUTS OUTPUTS LIBRARY...\n";
        return 2;
    }
    for (int i = 4; i < count; ++i) {
        if (dlopen(words[i], RTLD_NOW) != nullptr) continue;
        std::cerr << dlerror() << '\n';
        return 1;
    }
    std::ifstream file(words[2], std::ios::binary);
    const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
    const c10::IValue saved = torch::jit::pickle_load(bytes);
    std::vector<at::Tensor> inputs;
    for (const c10::IValue& value : saved.toListRef()) inputs.push_back(value.toTensor());

    torch::inductor::AOTIModelPackageLoader model(words[1]);
    const std::vector<at::Tensor> outputs = model.run(inputs);

    const std::vector<char> result =
        torch::jit::pickle_save(c10::ivalue::Tuple::create(std::vector<c10::IValue>(outputs.begin(), outputs.end())));
    std::ofstream(words[3], std::ios::binary).write(result.data(), static_cast<std::streamsize>(result.size()));
}
