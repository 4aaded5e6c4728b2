// What the vendors call their error codes: the numbers of the policy's table, and no others.
// tests/test_sim.py compares it with the vendor headers.
#pragma once

#include "common/fused_gr_policy.hpp"

namespace strata::sim {

struct ErrorName {
    int code;
    const char* cuda;
    const char* hip;  // null: this vendor has no such code
};

inline constexpr ErrorName kErrorNames[] = {
    {0, "cudaSuccess", "hipSuccess"},
    {1, "cudaErrorInvalidValue", "hipErrorInvalidValue"},
    {2, "cudaErrorMemoryAllocation", "hipErrorOutOfMemory"},
    {3, "cudaErrorInitializationError", "hipErrorNotInitialized"},
    {9, "cudaErrorInvalidConfiguration", "hipErrorInvalidConfiguration"},
    {13, "cudaErrorInvalidSymbol", "hipErrorInvalidSymbol"},
    {17, "cudaErrorInvalidDevicePointer", "hipErrorInvalidDevicePointer"},
    {21, "cudaErrorInvalidMemcpyDirection", "hipErrorInvalidMemcpyDirection"},
    {35, "cudaErrorInsufficientDriver", "hipErrorInsufficientDriver"},
    {98, "cudaErrorInvalidDeviceFunction", "hipErrorInvalidDeviceFunction"},
    {100, "cudaErrorNoDevice", "hipErrorNoDevice"},
    {101, "cudaErrorInvalidDevice", "hipErrorInvalidDevice"},
    {200, "cudaErrorInvalidKernelImage", "hipErrorInvalidImage"},
    {201, "cudaErrorDeviceUninitialized", "hipErrorInvalidContext"},
    {209, "cudaErrorNoKernelImageForDevice", "hipErrorNoBinaryForGpu"},
    {214, "cudaErrorECCUncorrectable", "hipErrorECCNotCorrectable"},
    {215, "cudaErrorUnsupportedLimit", "hipErrorUnsupportedLimit"},
    {218, "cudaErrorInvalidPtx", "hipErrorInvalidKernelFile"},
    {226, "cudaErrorContained", nullptr},
    {300, "cudaErrorInvalidSource", "hipErrorInvalidSource"},
    {301, "cudaErrorFileNotFound", "hipErrorFileNotFound"},
    {302, "cudaErrorSharedObjectSymbolNotFound", "hipErrorSharedObjectSymbolNotFound"},
    {303, "cudaErrorSharedObjectInitFailed", "hipErrorSharedObjectInitFailed"},
    {400, "cudaErrorInvalidResourceHandle", "hipErrorInvalidHandle"},
    {401, "cudaErrorIllegalState", "hipErrorIllegalState"},
    {500, "cudaErrorSymbolNotFound", "hipErrorNotFound"},
    {600, "cudaErrorNotReady", "hipErrorNotReady"},
    {700, "cudaErrorIllegalAddress", "hipErrorIllegalAddress"},
    {701, "cudaErrorLaunchOutOfResources", "hipErrorLaunchOutOfResources"},
    {702, "cudaErrorLaunchTimeout", "hipErrorLaunchTimeOut"},
    {708, "cudaErrorSetOnActiveProcess", "hipErrorSetOnActiveProcess"},
    {709, "cudaErrorContextIsDestroyed", "hipErrorContextIsDestroyed"},
    {710, "cudaErrorAssert", "hipErrorAssert"},
    {714, "cudaErrorHardwareStackError", nullptr},
    {715, "cudaErrorIllegalInstruction", nullptr},
    {716, "cudaErrorMisalignedAddress", nullptr},
    {717, "cudaErrorInvalidAddressSpace", nullptr},
    {718, "cudaErrorInvalidPc", nullptr},
    {719, "cudaErrorLaunchFailure", "hipErrorLaunchFailure"},
    {720, "cudaErrorCooperativeLaunchTooLarge", "hipErrorCooperativeLaunchTooLarge"},
    {721, "cudaErrorTensorMemoryLeak", nullptr},
    {801, "cudaErrorNotSupported", "hipErrorNotSupported"},
    {810, "cudaErrorMpsClientTerminated", nullptr},
    {900, "cudaErrorStreamCaptureUnsupported", "hipErrorStreamCaptureUnsupported"},
    {901, "cudaErrorStreamCaptureInvalidated", "hipErrorStreamCaptureInvalidated"},
    {902, "cudaErrorStreamCaptureMerge", "hipErrorStreamCaptureMerge"},
    {903, "cudaErrorStreamCaptureUnmatched", "hipErrorStreamCaptureUnmatched"},
    {904, "cudaErrorStreamCaptureUnjoined", "hipErrorStreamCaptureUnjoined"},
    {905, "cudaErrorStreamCaptureIsolation", "hipErrorStreamCaptureIsolation"},
    {906, "cudaErrorStreamCaptureImplicit", "hipErrorStreamCaptureImplicit"},
    {907, "cudaErrorCapturedEvent", "hipErrorCapturedEvent"},
    {908, "cudaErrorStreamCaptureWrongThread", "hipErrorStreamCaptureWrongThread"},
    {910, "cudaErrorGraphExecUpdateFailure", "hipErrorGraphExecUpdateFailure"},
    {911, "cudaErrorExternalDevice", "hipErrorInvalidChannelDescriptor"},
    {912, "cudaErrorInvalidClusterSize", "hipErrorInvalidTexture"},
    {999, "cudaErrorUnknown", "hipErrorUnknown"},
    {1052, nullptr, "hipErrorRuntimeMemory"},
    {1053, nullptr, "hipErrorRuntimeOther"},
};

constexpr const char* error_name(int code, GrBackend vendor) {
    for (const ErrorName& row : kErrorNames) {
        const char* name = vendor == GrBackend::Cuda ? row.cuda : row.hip;
        if (row.code == code && name != nullptr) return name;
    }
    return vendor == GrBackend::Cuda ? "cudaErrorUnknown" : "hipErrorUnknown";
}

}  // namespace strata::sim
