"""Tracing: conversion of the user's model to a graph."""
