# The Python module: an extension over libsirtaki.so, bound with the pybind11 that torch's wheel has.
#
# In the build folder python/sirtaki is the package as it is used, so that PYTHONPATH=<build>/python is all that programs
# need.
set(SIRTAKI_HAVE_PYTHON OFF)
if(SIRTAKI_PYTHON STREQUAL "OFF")
  set(sirtaki_python_status "off: SIRTAKI_PYTHON=OFF")
  return()
endif()

set(sirtaki_python_why "")
if(NOT SIRTAKI_HAVE_TORCH)
  set(sirtaki_python_why "it needs LibTorch")
elseif(SIRTAKI_SANITIZE)
  set(sirtaki_python_why "a sanitizer's runtime would have to be in the interpreter")
elseif(NOT EXISTS "${LibTorch_ROOT_DIR}/lib/libtorch_python.so" OR NOT EXISTS "${LibTorch_ROOT_DIR}/include/pybind11/pybind11.h")
  set(sirtaki_python_why "this LibTorch is without Python; one from PyPI is needed")
else()
  # The Python that has this torch.
  if(NOT Python_EXECUTABLE AND LibTorch_ROOT_DIR MATCHES "^(.*)/lib/python[0-9.]+/(site|dist)-packages/torch$")
    if(EXISTS "${CMAKE_MATCH_1}/bin/python3")
      set(Python_EXECUTABLE "${CMAKE_MATCH_1}/bin/python3")
    endif()
  endif()
  find_package(Python 3.10 QUIET COMPONENTS Interpreter Development.Module)
  if(NOT Python_FOUND)
    set(sirtaki_python_why "no Python 3.10 or newer with headers found (Debian: python3-dev)")
  endif()
endif()

if(sirtaki_python_why STREQUAL "")
  set(SIRTAKI_HAVE_PYTHON ON)
  set(sirtaki_python_status "${Python_VERSION}, ${Python_EXECUTABLE}")
elseif(SIRTAKI_PYTHON STREQUAL "ON")
  message(FATAL_ERROR "SIRTAKI_PYTHON=ON, but ${sirtaki_python_why}.")
else()
  set(sirtaki_python_status "off: ${sirtaki_python_why}")
endif()

# sirtaki_add_python_module(): the extension, the package around it in the build folder, and how both are installed.
function(sirtaki_add_python_module)
  set(folder "${PROJECT_SOURCE_DIR}/frameworks/python")
  set(package "${PROJECT_BINARY_DIR}/python/sirtaki")
  file(GLOB sources CONFIGURE_DEPENDS "${folder}/*.cc")
  Python_add_library(sirtaki_python MODULE WITH_SOABI ${sources})
  target_compile_features(sirtaki_python PRIVATE cxx_std_20)
  target_include_directories(sirtaki_python PRIVATE "${PROJECT_SOURCE_DIR}")
  target_link_libraries(sirtaki_python PRIVATE sirtaki_flags sirtaki "${LibTorch_ROOT_DIR}/lib/libtorch_python.so")
  sirtaki_compile_fast(sirtaki_python)
  sirtaki_use_library_pch(sirtaki_python)
  set_target_properties(sirtaki_python PROPERTIES
    DEFINE_SYMBOL ""   # a macro more, and the precompiled header would not be its own
    UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 8   # small files, each of which has torch's and pybind11's headers to read
    OUTPUT_NAME _C
    LIBRARY_OUTPUT_DIRECTORY "${package}"
    INSTALL_RPATH "$ORIGIN/lib:$ORIGIN/../torch/lib")

  # The sources themselves, so that a change is seen without a build.
  file(MAKE_DIRECTORY "${package}")
  foreach(part IN ITEMS __init__.py __main__.py _C.pyi py.typed _launcher.py common horovod torch)
    file(CREATE_LINK "${folder}/sirtaki/${part}" "${package}/${part}" SYMBOLIC)
  endforeach()
  set(SIRTAKI_LAUNCHER "")
  if(SIRTAKI_HAVE_LAUNCH AND NOT SKBUILD)
    set(SIRTAKI_LAUNCHER "${PROJECT_BINARY_DIR}/sirtakirun")
  endif()
  configure_file("${folder}/build_facts.py.in" "${package}/_build.py" @ONLY)

  if(SKBUILD)
    install(TARGETS sirtaki_python LIBRARY DESTINATION sirtaki)
    install(FILES "${package}/_build.py" DESTINATION sirtaki)
  endif()
endfunction()
